"""A file that is whole or not there, synced to the disk, and in words why it could not be written."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS}  # of a folder, on CIFS, 9p and some FUSE file systems


class AtomicFile:
    """Context that gives a temporary path beside `path`, and puts it in place when the body went well.

    Raises:
        OSError: the disk is full, or fails; what was at `path` before is still there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # A name that nobody can foresee, and put a symbolic link at.
        self.temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, __: object) -> None:
        failure = _full_disk(error)
        try:
            if error is None:
                sync(self.temporary)
                os.replace(self.temporary, self.path)
                sync(self.path.parent)
        except OSError as this:
            error = failure = this
        finally:
            with suppress(OSError):  # of a disk that fails
                self.temporary.unlink(missing_ok=True)
        if failure is not None:
            raise unwritable(self.path, failure) from error


def remove_leftovers(path: Path) -> None:
    """Delete what processes that were killed while they wrote `path` have left beside it."""
    for each in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        each.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    with AtomicFile(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextmanager
def new_file(path: Path) -> Iterator[None]:
    """Make the folder that a file is to be in, if need be; the body writes the file.

    Raises:
        OSError: one of them cannot be made, or the path is a folder's.
    """
    if path.is_dir():
        raise IsADirectoryError(f"cannot write {path}: it is a folder; name a file in it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot write {path}: no folder {path.parent} can be made: {error.strerror}") from error
    try:
        yield
    except OSError as error:
        if error.filename is None:  # it was told in words
            raise
        raise OSError(f"cannot write {path}: {error.strerror}") from error


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names where the file system can, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC or not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError) -> OSError:
    """Say in words that `path` could not be written, and what room there is if that was the cause."""
    free = ""
    if error.errno in _FULL:
        with suppress(OSError):
            usage = shutil.disk_usage(next(each for each in path.parents if each.is_dir()))
            free = f"; {usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB are free there"
    message = f"cannot write {path}: {error.strerror or error}{free}; what was written before is whole"
    return OSError(error.errno, message) if error.errno is not None else OSError(message)


def check_folder(folder: Path) -> None:
    """See that a run's folder is still there, before something is written that would make it anew.

    Raises:
        FileNotFoundError: it is not.
    """
    if not os.path.isdir(folder):  # for each row: half the calls of is_dir()
        raise FileNotFoundError(
            errno.ENOENT,
            f"cannot write to {folder}: it was deleted during the run; start the run again, and keep its logdir "
            "until it has ended",
        )


class appending:  # noqa: N801  # a context manager, entered for each row: contextlib's makes thrice as many calls
    """Let an error of the body, which adds to a log of the run, say which one and what room there is.

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
    """Find in what led to `error` that the disk is full: torch.save raises something else on its way out."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return error
        error = error.__cause__ or error.__context__
    return None
