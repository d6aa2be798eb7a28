"""The claim of a logdir by one run, on a disk or in a store, and what the run tells the store.

All functions but :func:`claim` do nothing for a logdir on a disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from runnerkit.storage.logdir_lock import is_held, lock
from runnerkit.storage.remote import copies
from runnerkit.storage.remote.copies import is_whole, local_copy
from runnerkit.storage.remote.manifest import Entry
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import as_url, is_copy, url_of

if TYPE_CHECKING:
    from runnerkit.storage.remote.logdir import StoredLogdir

_claimed: dict[Path, StoredLogdir] = {}  # by this process


def claim(logdir: Path, *, num_processes: int = 1) -> Callable[[], None]:
    """Keep other runs out of a logdir, and fill the staging folder of one in a store.

    Args:
        num_processes: of the run.
    Returns:
        A function that waits for the last upload and lets other runs in.
    Raises:
        FileExistsError: another run is writing there.
        ValueError: the processes of the run do not share the store.
        OSError: the folder or the store cannot be written to.
    """
    url = url_of(logdir)
    if url is None:
        return lock(logdir)
    if url.startswith("memory://") and num_processes > 1:
        raise ValueError(f"{url} is the memory of one process, and the run has {num_processes}: pass another logdir")
    if logdir in _claimed:
        raise FileExistsError(f"another run of this process is writing to {url}: wait for it, or choose another logdir")
    from runnerkit.storage.remote.logdir import StoredLogdir  # late, as few runs need it

    _claimed[logdir] = StoredLogdir(logdir)

    def release() -> None:
        _claimed.pop(logdir).close()

    return release


def flush(logdir: Path) -> None:
    """Upload the logs soon."""
    if logdir in _claimed:
        _claimed[logdir].flush()


def publish(logdir: Path, checksums: Mapping[str, str], shards: Mapping[str, Mapping[str, str]] | None = None) -> None:
    """Upload the checkpoints in the background: see :meth:`StoredLogdir.publish`."""
    if logdir in _claimed:
        _claimed[logdir].publish(checksums, shards or {})


def wait(logdir: Path) -> None:
    """Wait until everything is in the store."""
    if logdir in _claimed:
        _claimed[logdir].wait()


def announce_shards(folder: Path, checksums: Mapping[str, str]) -> None:
    """Record that the processes are about to upload the shards in `folder`; rank zero calls this."""
    logdir = folder.parent.parent
    if logdir in _claimed:
        name = _checkpoint_of(folder)
        _claimed[logdir].announce([Entry.of(sha256, shard_of=name).object for sha256 in checksums.values()])


def upload_shards(folder: Path, checksums: Mapping[str, str]) -> None:
    """Upload files of `folder`, of a checkpoint that is being saved; each process calls this for its own."""
    url = url_of(folder.parent.parent)
    if url is None:
        return
    store, name = Store(url), _checkpoint_of(folder)
    for file, sha256 in checksums.items():
        store.put(Entry.of(sha256, shard_of=name).object, folder / file)
    if not (folder / ".metadata").exists():  # on another machine than rank zero, where nothing else is done with them
        for file in checksums:
            (folder / file).unlink()
        with suppress(OSError):  # other processes on this machine have not uploaded theirs
            folder.rmdir()


def readable(path: str | os.PathLike[str], *, which: Literal["best", "last"] | None = None) -> Path:
    """Return a local path for reading: `path` itself, or, for a URL, its place in this run's logdir or a copy.

    Args:
        which: the checkpoint of a logdir that is needed; None is all of it.
    """
    staged = _in_staging(path)
    return staged if staged is not None and staged.exists() else local_copy(path, which=which)


@contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide the local path for a new file, as :func:`copies.written`, or its place in this run's logdir."""
    staged = _in_staging(path)
    with nullcontext(staged) if staged is not None else copies.written(path) as local:
        if staged is not None:
            staged.parent.mkdir(parents=True, exist_ok=True)
        yield local


def _in_staging(path: str | os.PathLike[str]) -> Path | None:
    """Return the place of a URL in the staging folder of a logdir that this process has claimed."""
    if (url := as_url(path)) is None:
        return None
    bases = {url_of(logdir) or "": logdir for logdir in _claimed}
    bases = {base: logdir for base, logdir in bases.items() if base and f"{url}/".startswith(f"{base}/")}
    if not bases:
        return None
    base = max(bases, key=len)  # a logdir may be in another
    return bases[base] / url.removeprefix(base).lstrip("/")


def bring(path: str | os.PathLike[str], url: str) -> Path:
    """Return the local path of a checkpoint that rank zero found, perhaps on another machine.

    Args:
        path: on rank zero's machine.
        url: what :func:`shown` returned for it there.
    """
    path = Path(path)
    if as_url(url) is None or is_copy(path):
        return path
    logdirs = [each for each in path.parents if url_of(each) is not None]
    is_here = url_of(path) == url and any(each in _claimed or is_held(each) for each in logdirs)
    return path if is_here and is_whole(path, url) else local_copy(url)


def _checkpoint_of(folder: Path) -> str:
    """Return the name of the checkpoint whose shards are written to a temporary folder."""
    return folder.name.removeprefix(".").removesuffix(".tmp")
