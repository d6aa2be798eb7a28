"""A process and the one that started it: when that dies, and whether this one runs at all."""

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
    """Whether torchrun started this process, or a script that runs in its place."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_stopped(pid: int) -> bool:
    """Whether a process was stopped by SIGSTOP, or by a debugger (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has ended, or there is no /proc
        return False
