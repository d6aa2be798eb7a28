"""Lock of a logdir: a second run at the same time is refused, and a killed run does not block others.

The lock is a record lock (``fcntl.lockf``) on a file, which the kernel releases when the process ends, for whatever
reason. The choice of lock:

- A file with a process id outlives a kill, and on another machine the id means nothing.
- ``flock`` belongs to the open file, which forked processes share: a worker of a DataLoader that outlives its killed
  parent (workers check every 5 s) would block the resumed run. A record lock is not inherited.
- A record lock works over NFS (``flock`` there becomes one), where the lock of a machine that died ends with its lease,
  after about a minute.

The trap: the lock ends when its process closes any descriptor of the file, so nothing else in the process of the run
may open the file; copying the logdir in that process loses the lock, but no data. Two runs in one process are not
separated by the lock; they run one after the other.

Windows has neither kind of lock, so runs there are not locked.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from runnerkit.storage.links import refuse_link
from runnerkit.storage.remote.urls import shown

logger = logging.getLogger(__name__)

FILE = ".lock"
_PATIENCE_S = 2.0  # time that a killed process may take to disappear
_PAUSE_S = 0.05
_TAKEN = (errno.EACCES, errno.EAGAIN)  # errors of lockf if another process holds the lock


class LogdirInUse(FileExistsError):
    """Error of a run whose logdir another process is writing to."""


def lock(logdir: Path) -> Callable[[], None]:
    """Lock `logdir`, created if needed, for this process; return a function that releases it.

    If files cannot be locked there, and on Windows, a warning is logged instead.

    Raises:
        LogdirInUse: another process holds the lock.
        OSError: the folder cannot be created or written to, or its lock file is a symbolic link.

    >>> import tempfile
    >>> unlock = lock(Path(tempfile.mkdtemp()))
    >>> unlock()
    """
    is_new = not logdir.exists()
    if sys.platform == "win32":
        try:
            _make(logdir)
        except OSError as error:
            raise _unwritable(logdir, error) from error
        logger.warning("%s is not locked, which needs Linux or macOS: make sure that no other run writes there", logdir)
        return no_lock
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            descriptor = _try(logdir)
        except OSError as error:
            refuse_link(logdir / FILE)
            if not (logdir / FILE).exists():
                raise _unwritable(logdir, error) from error
            logger.warning("%s cannot be locked (%s): make sure that no other run writes there", logdir, error)
            return no_lock
        if descriptor is not None:
            return partial(_unlock, logdir, descriptor, is_new)
        if time.monotonic() > deadline:
            raise LogdirInUse(
                f"another run is writing to {shown(logdir)}: {holder(logdir)}. Wait for it to end, or choose another "
                f"logdir; if its machine is dead, delete {logdir / FILE}"
            )
        time.sleep(_PAUSE_S)


def no_lock() -> None:
    """Release nothing: what :func:`lock` returns if the folder cannot be locked."""


def _unwritable(logdir: Path, error: OSError) -> OSError:
    number, why = (errno.ENOTDIR, "it is a file") if logdir.is_file() else (error.errno, error.strerror)
    return OSError(number, f"cannot write to logdir {logdir}: {why}; choose another one")


def holder(logdir: Path) -> str | None:
    """Describe the process that holds the lock, or last held it if it was killed; None without a lock file."""
    if (logdir / FILE).is_symlink():
        return "none: the lock file is a symbolic link; delete it"
    try:
        return (logdir / FILE).read_text(encoding="utf-8").strip() or "a process that has just started"
    except FileNotFoundError:
        return None


def is_held(logdir: Path) -> bool:
    """Return whether another process holds the lock; False on Windows, where runs do not lock."""
    if sys.platform == "win32" or (logdir / FILE).is_symlink():
        return False
    import fcntl

    with suppress(FileNotFoundError), (logdir / FILE).open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except OSError as error:
            return error.errno in _TAKEN
    return False


def _try(logdir: Path) -> int | None:
    """Return the descriptor of the locked file; None if another process holds it or it was just replaced."""
    import fcntl  # POSIX only

    path = logdir / FILE
    if not _make(logdir):
        return None
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except FileNotFoundError:  # the folder was deleted meanwhile
        return None
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), path.lstat()):  # otherwise its owner just deleted it
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}\n".encode())
            return descriptor
    except FileNotFoundError:
        pass  # deleted, as above
    except OSError as error:
        if error.errno not in _TAKEN:
            os.close(descriptor)
            raise
    os.close(descriptor)
    return None


def _make(logdir: Path) -> bool:
    """Create the folder if needed; return False if its owner deleted it meanwhile."""
    try:
        logdir.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        with suppress(FileNotFoundError):
            if not stat.S_ISDIR(logdir.lstat().st_mode):
                raise
        return False
    return True


def _unlock(logdir: Path, descriptor: int, is_new: bool) -> None:
    with suppress(OSError):
        (logdir / FILE).unlink()  # before unlocking: afterwards it may be another run's
    os.close(descriptor)
    if is_new:
        with suppress(OSError):
            logdir.rmdir()  # fails unless empty: only a run that was refused leaves nothing
