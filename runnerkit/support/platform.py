"""Differences between operating systems: signals, replaced files, and features that Windows lacks."""

from __future__ import annotations

import os
import signal
import sys
import time

ASKS_A_RUN = "asks_a_run"  # attribute of a handler of signals: they ask the run of its process to stop
_OPEN_ELSEWHERE_S = 2.0  # time that Windows waits for a virus scanner or another reader to close a file
_PAUSE_S = 0.02


class OwnHandler:
    """Base class of this library's handlers of signals that end the process, as without a handler."""


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return the signals of these names that this system has; Windows lacks SIGHUP and SIGUSR1.

    >>> signals("SIGINT", "SIGNONE") == (signal.SIGINT,)
    True
    """
    known = vars(signal)
    return tuple(known[name] for name in names if name in known)


def replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename `source` to `target` atomically. Windows refuses while a program has `target` open, so wait for that.

    Raises:
        PermissionError: on Windows, `target` stays open.
    """
    deadline = time.monotonic() + _OPEN_ELSEWHERE_S
    while True:
        try:
            os.replace(source, target)
            return
        except PermissionError:
            if sys.platform != "win32" or time.monotonic() > deadline:
                raise
        time.sleep(_PAUSE_S)


def exists(pid: int) -> bool:
    """Return whether there is a process of this number; on Linux also if its parent has not read how it ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        pass
    return True


def refuse_windows(what: str) -> None:
    """Raise on Windows.

    Args:
        what: subject of the error message, in the plural.
    Raises:
        RuntimeError: this is Windows.
    """
    if sys.platform == "win32":
        raise RuntimeError(
            f"{what} need Linux or macOS: on Windows, train in one process (without ddp=True), or use WSL 2"
        )
