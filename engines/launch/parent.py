"""Relations between a process and its parent: death with the parent, launcher and stopped state."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent dies, however it dies (Linux)."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)


def is_torchruns() -> bool:
    """Return whether torchrun started this process, directly or through a script."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP or a debugger (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has ended, or there is no /proc
        return False
