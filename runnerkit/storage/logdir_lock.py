"""One run at a time in a logdir: a second is refused, and one that was killed blocks nobody.

What is locked is a file, by a record lock (``fcntl.lockf``), which the kernel takes back when its process ends, however
it ends. Of the kinds of lock there are:

- A file with a process id outlives a kill, and on another machine the id means nothing.
- ``flock`` belongs to the open file, which forked processes share: a worker of a DataLoader that outlives its killed
  parent (they look every 5 s) would keep the run that resumes out. A record lock is not inherited.
- A record lock goes over NFS (``flock`` there becomes one), where the lock of a machine that died ends with its lease,
  after about a minute.

Its trap: it ends when its process closes any descriptor of the file, so nobody else is to open the file in the process
of the run; whoever copies the logdir there loses the guard, and nothing else. Nor does it tell two runs in one process
apart; these come one after the other.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from runnerkit.storage.links import refuse_link

logger = logging.getLogger(__name__)

FILE = ".lock"
_PATIENCE_S = 2.0  # that a killed process may take to be gone
_PAUSE_S = 0.05
_TAKEN = (errno.EACCES, errno.EAGAIN)  # what lockf says when another process has it


def lock(logdir: Path) -> Callable[[], None]:
    """Take `logdir`, made if need be, for this process; what is returned lets go of it.

    Where files cannot be locked, a warning is logged, and nothing is.

    Raises:
        FileExistsError: another process has it.
        OSError: it cannot be made, or not be written to, or the file in it is a symbolic link.

    >>> import tempfile
    >>> unlock = lock(Path(tempfile.mkdtemp()))
    >>> unlock()
    """
    is_new = not logdir.exists()
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            descriptor = _try(logdir)
        except (OSError, ImportError) as error:
            refuse_link(logdir / FILE)
            if isinstance(error, OSError) and not (logdir / FILE).exists():
                raise _unwritable(logdir, error) from error
            logger.warning("%s cannot be locked (%s): see to it that no other run writes there", logdir, error)
            return lambda: None
        if descriptor is not None:
            return partial(_unlock, logdir, descriptor, is_new)
        if time.monotonic() > deadline:
            raise FileExistsError(
                f"another run is writing to {logdir}: {holder(logdir)}. Wait for its end, or choose another logdir; if "
                f"its machine is dead, delete {logdir / FILE}"
            )
        time.sleep(_PAUSE_S)


def _unwritable(logdir: Path, error: OSError) -> OSError:
    number, why = (errno.ENOTDIR, "it is a file") if logdir.is_file() else (error.errno, error.strerror)
    return OSError(number, f"cannot write to logdir {logdir}: {why}; choose another one")


def holder(logdir: Path) -> str | None:
    """Say whose the folder is, or last was if a run was killed; None if nobody's."""
    if (logdir / FILE).is_symlink():
        return "nobody: a symbolic link is in the place of the lock; delete it"
    try:
        return (logdir / FILE).read_text(encoding="utf-8").strip() or "a process that has just started"
    except FileNotFoundError:
        return None


def is_held(logdir: Path) -> bool:
    """Whether another process has the folder."""
    import fcntl

    if (logdir / FILE).is_symlink():
        return False
    with suppress(FileNotFoundError), (logdir / FILE).open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed
        except OSError as error:
            return error.errno in _TAKEN
    return False


def _try(logdir: Path) -> int | None:
    """Return the descriptor of the file, locked; None if another process has it, or if it was just replaced."""
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
        if os.path.samestat(os.fstat(descriptor), path.lstat()):  # else its owner deleted it meanwhile: not the lock
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()} since {time.ctime()}\n".encode())
            return descriptor
    except FileNotFoundError:
        pass  # deleted, likewise
    except OSError as error:
        if error.errno not in _TAKEN:
            os.close(descriptor)
            raise
    os.close(descriptor)
    return None


def _make(logdir: Path) -> bool:
    """Make the folder if need be; return False if its owner deleted it meanwhile."""
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
        (logdir / FILE).unlink()  # before it is unlocked: later it may be another run's
    os.close(descriptor)
    if is_new:
        with suppress(OSError):
            logdir.rmdir()  # a run that was refused leaves nothing; any other has left something here
