"""Relations between a process and its parent: death with the parent, launcher and stopped state."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path

_POLL_S = 0.5


def die_with_parent() -> None:
    """End this process when its parent dies, however it dies: at once on Linux, elsewhere within a second."""
    if sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
        ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    else:
        threading.Thread(target=_end_after_parent, args=(os.getppid(),), name="runnerkit-parent", daemon=True).start()


def _end_after_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    os._exit(128 + signal.SIGTERM)


def is_started_by_torchrun() -> bool:
    """Return whether torchrun started this process, directly or through a script."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped by SIGSTOP or a debugger (Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:  # it has ended, or there is no /proc
        return False
