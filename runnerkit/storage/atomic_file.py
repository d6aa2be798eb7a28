"""Atomic files, synced to the disk, with errors that explain why a file cannot be written."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from runnerkit.support.platform import replace

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # for a folder, on CIFS, 9p and some FUSE file systems


class AtomicFile:
    """Context that provides a temporary path beside `path`, and renames it to `path` if the body succeeds.

    Raises:
        OSError: the disk is full or fails; the previous file at `path` is kept.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Unpredictable, so that no one can plant a symbolic link there.
        self.temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        failure = _full_disk(error)
        try:
            if error is None:
                sync(self.temporary)
                replace(self.temporary, self.path)
                sync(self.path.parent)
        except OSError as this:
            error = failure = this
        finally:
            with suppress(OSError):  # the disk fails
                self.temporary.unlink(missing_ok=True)
        if failure is not None:
            raise unwritable(self.path, failure) from error


def remove_leftovers(path: Path) -> None:
    """Delete the temporary files of processes that were killed while they wrote `path`."""
    for each in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        each.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with AtomicFile(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")  # the same bytes on Windows


@contextmanager
def new_file(path: Path) -> Iterator[None]:
    """Create the folder of a file, if needed; the body writes the file.

    Raises:
        OSError: the folder or the file cannot be created, or the path is a folder.
    """
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write {path}: folder {path.parent} cannot be created: {error.strerror}") from error
    try:
        yield
    except OSError as error:
        if error.filename is None:  # it has its own message
            raise
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def sync(path: Path) -> None:
    """Wait until a file is on the disk, or a folder's list of names if the file system supports that."""
    if sys.platform == "win32":
        if path.is_dir():  # Windows does not open folders
            return
        descriptor = os.open(path, os.O_RDWR)  # it syncs only files that are open for writing
    else:
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except PermissionError:
            if not path.is_dir():
                raise
            return  # one may write to a folder without being allowed to list it
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError) -> OSError:
    """Return an error for a `path` that cannot be written, with the free space if that is the cause."""
    free = ""
    if error.errno in _FULL:
        with suppress(OSError):
            usage = shutil.disk_usage(next(each for each in path.parents if each.is_dir()))
            free = f"; {usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB are free there"
    message = f"cannot write {path}: {error.strerror or error}{free}; what was written before is intact"
    return OSError(error.errno, message) if error.errno is not None else OSError(message)


def check_folder(folder: Path) -> None:
    """Raise if a run's folder was deleted, before a write would create it again.

    Raises:
        FileNotFoundError: it was deleted.
    """
    if not os.path.isdir(folder):  # called for each row: half the calls of is_dir()
        raise FileNotFoundError(
            errno.ENOENT,
            f"cannot write to {folder}: it was deleted during the run; start the run again, and keep its logdir "
            "until it has ended",
        )


class appending:  # noqa: N801  # a context manager, entered for each row: contextlib's makes three times as many calls
    """Context for appending to a log of the run: errors name the log and the free space.

    Args:
        path: the log, or its folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            check_folder(self.path if not self.path.suffix else self.path.parent)
            raise unwritable(self.path, error) from error


def _full_disk(error: BaseException | None) -> OSError | None:
    """Find a full disk among the causes of `error`: torch.save raises something else on its way out."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None
