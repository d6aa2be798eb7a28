"""Local copies of what is in stores, for reading; and files that are written there."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal

from runnerkit.storage.logdir_lock import is_held, lock
from runnerkit.storage.remote.files import link
from runnerkit.storage.remote.manifest import CHECKPOINTS, FILE, LEASE, OBJECTS, Manifest
from runnerkit.storage.remote.store import Store
from runnerkit.storage.remote.urls import COPY, as_url, folder_for, plain_path, root

logger = logging.getLogger(__name__)

Part = Literal["all", "run", "logs", "best", "last"]  # of what is at a URL: see copy_into

_NUM_ATTEMPTS = 30  # a run that trains deletes what its newest manifest no longer names
_LOGS = (
    *("*csv/*.csv", "*metrics.jsonl", "*hparams.yml", "*environment.json", "*config.yml", "*status.json"),
    "*checkpoints/index.json",
)
_NEW_S = 60.0
_folder: Path | None = None
_marks: dict[Path, str] = {}  # of the objects that were copied


def local_copy(
    path: str | os.PathLike[str], *, logs_only: bool = False, which: Literal["best", "last"] | None = None
) -> Path:
    """Return a local path: of `path` itself, or of a copy of what is at a URL.

    The copy of a logdir has the files and names that it would have on a disk. A second call updates it. It is deleted
    when the process ends.

    Args:
        path: a logdir, a folder of several, a checkpoint in a logdir, or any other file or folder.
        logs_only: copy only metrics, settings and the index of checkpoints.
        which: of a logdir, copy only this checkpoint and the index.
    Raises:
        FileNotFoundError: nothing is there.
        OSError: the store cannot be read.
    """
    url = as_url(path)
    if url is None:
        return plain_path(path)
    target = folder_for(url, _own_folder())
    copy_into(target, url, part="logs" if logs_only else which or "run")
    return target


def copy_into(target: Path, url: str, *, part: Part = "all") -> None:
    """Copy what is at a URL to `target`.

    Args:
        part: "run" is what a run wrote, and "all" includes other objects in its logdir, such as reports; "logs" is
            metrics, settings and the index of checkpoints; "best" and "last" are one checkpoint and the index. Of
            anything but a logdir, these two copy everything.

    Raises:
        FileNotFoundError, OSError: as :func:`local_copy`.
    """
    for attempt in range(_NUM_ATTEMPTS):
        try:
            if paths := _copied(target, url, part):
                _delete_others(target, paths, part)
                return
            break
        except FileNotFoundError:
            if attempt == _NUM_ATTEMPTS - 1:
                raise
    raise FileNotFoundError(f"{url}: nothing is there")


def holds_run(url: str) -> bool:
    """Return whether a run has written to a URL."""
    return Store(url).exists(FILE)


def is_whole(path: Path, url: str) -> bool:
    """Return whether all files of a checkpoint in a logdir are at `path`."""
    if (found := _find_run(url)) is None:
        return False
    _, manifest, start = found
    below = [name for name in manifest.checkpoints if _is_at(name, start)]
    return bool(below) and all((path / name.removeprefix(start).lstrip("/")).exists() for name in below)


def logdir_of(path: Path) -> Path:
    """Return the logdir of `path`, which is one or a checkpoint in one; both may be URLs."""
    url = as_url(path)
    if url is not None:
        if (found := _find_run(url)) is not None:
            return Path(found[0].url)
        is_file = len(logdirs := _logdirs(url)) > 1 and Store(url).exists()  # of a run that was copied to the store
        return Path(logdirs[1][0] if is_file else url)
    return path if path.is_dir() else path.parent.parent  # LOGDIR/checkpoints/model.0003.pth


def name_of(path: str | os.PathLike[str]) -> Path:
    """Return what a function that wrote to `path` returns: a path, from which :func:`as_url` makes a URL again."""
    return Path(as_url(path) or plain_path(path))


@contextmanager
def written(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Provide the local path for a new file or folder; it is uploaded if `path` is a URL and the body succeeds.

    Raises:
        OSError: it could not be uploaded.
    """
    url = as_url(path)
    if url is None:
        yield plain_path(path)
        return
    folder = _own_folder() / f"new-{os.urandom(8).hex()}"
    target = folder / url.rpartition("/")[2]
    folder.mkdir()
    try:
        yield target
        if target.is_dir():
            store = Store(url)
            for each in sorted(path for path in target.rglob("*") if path.is_file()):
                store.put(each.relative_to(target).as_posix(), each)
        else:
            Store(url.rpartition("/")[0]).put(target.name, target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _logdirs(url: str) -> list[tuple[str, str]]:
    """Return the logdirs in which a URL may be, and its name in each: itself, then the folders of "checkpoints"."""
    protocol, _, rest = url.partition("://")
    parts = rest.split("/")
    places = [place for place in range(len(parts) - 1, 0, -1) if parts[place] == CHECKPOINTS]  # 0 is the bucket
    return [(url, ""), *((f"{protocol}://{'/'.join(parts[:each])}", "/".join(parts[each:])) for each in places)]


def _find_run(url: str) -> tuple[Store, Manifest, str] | None:
    """Return the run to which a URL belongs, and the name of the URL in it: of the logdir, "", or of checkpoints."""
    for logdir, name in _logdirs(url):
        store = Store(logdir)
        if (read := store.read(FILE)) is not None:
            return store, Manifest.from_json(read[0], logdir), name
    return None


def _copied(target: Path, url: str, part: Part) -> set[Path]:
    """Copy what is at a URL; return the paths of all that is there, in a run also of what is not wanted."""
    if (found := _find_run(url)) is not None and (paths := _copy_manifest(target, *found, part)):
        store, manifest, name = found
        if part == "all" and not name:
            paths |= _copy_names(target, store, _not_of(manifest, store.names()), part)
        return paths
    store = Store(url)
    if store.exists():
        _copy_object(target, store, "")
        return {target}
    return _copy_names(target, store, store.names(), part)


def _copy_manifest(target: Path, store: Store, manifest: Manifest, start: str, part: Part) -> set[Path]:
    start = _resolve_link(manifest, start)
    paths = {
        name: target / name.removeprefix(start).lstrip("/")
        for name in {*manifest.checkpoints, *manifest.links, *manifest.logs}
        if _is_at(name, start)
    }
    is_wanted = _weights(manifest, part) if part in ("best", "last") and start in ("", CHECKPOINTS) else _filter(part)
    copied: dict[str, Path] = {}  # by object: "last.pth" and "best.pth" are other names of one
    for name, path in list(paths.items()):
        if not is_wanted(name):
            continue
        if name in manifest.links:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            path.symlink_to(manifest.links[name], target_is_directory=True)
        elif name in manifest.checkpoints:
            entry = manifest.checkpoints[name]
            if _marks.get(path) != entry.object or not path.exists():
                if entry.object in copied:
                    path.unlink(missing_ok=True)
                    link(copied[entry.object], path)
                else:
                    store.get(entry.object, path, sha256=entry.sha256)
                _marks[path] = entry.object
            copied[entry.object] = path
        else:
            try:
                _copy_object(path, store, name)
            except FileNotFoundError:
                logger.warning("%s/%s is missing; continuing without it", store.url, name)
                del paths[name]
    return {*paths.values()} if start else {*paths.values(), target}  # of a run that has not written anything yet


def _resolve_link(manifest: Manifest, name: str) -> str:
    return f"{name.rpartition('/')[0]}/{manifest.links[name]}" if name in manifest.links else name


def _is_at(name: str, start: str) -> bool:
    return not start or name == start or name.startswith(f"{start}/")


def _weights(manifest: Manifest, which: str) -> Callable[[str], bool]:
    """Return the filter of the files that are needed to find and read one checkpoint."""
    index, alias = f"{CHECKPOINTS}/index.json", f"{CHECKPOINTS}/{which}"
    target = _resolve_link(manifest, alias)
    return lambda name: (
        index not in manifest.checkpoints or name in (index, f"{alias}.pth", alias) or _is_at(name, target)
    )


def _filter(part: Part) -> Callable[[str], bool]:
    return _is_log if part == "logs" else lambda name: True


def _not_of(manifest: Manifest, names: list[str]) -> list[str]:
    """Return the names of objects in a logdir that have nothing to do with the run."""
    own = {FILE, LEASE, *manifest.checkpoints, *manifest.links, *manifest.logs}
    return [name for name in names if name not in own and not name.startswith(f"{OBJECTS}/")]


def _copy_names(target: Path, store: Store, names: list[str], part: Part) -> set[Path]:
    """Copy objects, and runs among them; return their paths."""
    is_wanted = _filter(part)
    names = [name for name in names if ".." not in name.split("/")]  # its copy would be elsewhere
    runs = []
    paths = set[Path]()
    for run in [name.removesuffix(FILE) for name in names if name.endswith(f"/{FILE}")]:
        try:
            paths |= _copied(target / run, f"{store.url}/{run.rstrip('/')}", part)
            runs.append(run)
        except ValueError as error:
            logger.warning("%s: copying its files one by one, because it is not a readable run", error)
    for name in names:
        if is_wanted(name) and not name.startswith(tuple(runs)):
            _copy_object(target / name, store, name)
            paths.add(target / name)
    return paths


def _delete_others(target: Path, paths: set[Path], part: Part) -> None:
    """Delete files of an earlier copy that are not in the store anymore."""
    is_wanted = _filter(part)
    for path in sorted(target.rglob("*"), reverse=True):  # a folder after what is in it
        if path.is_dir() and not path.is_symlink():
            with suppress(OSError):  # removes only an empty folder
                path.rmdir()
        elif path not in paths and not path.name.endswith(".tmp") and is_wanted(path.relative_to(target).as_posix()):
            path.unlink(missing_ok=True)


def _copy_object(path: Path, store: Store, name: str) -> None:
    mark = store.mark_of(name)
    if _marks.get(path) != mark or not path.exists():
        store.get(name, path)
        _marks[path] = mark


def _is_log(name: str) -> bool:
    return any(fnmatch(name, pattern) for pattern in _LOGS)


def _own_folder() -> Path:
    """Return this process's folder for copies."""
    global _folder
    if _folder is None or not _folder.is_dir():
        for left in root().glob(f"{COPY}*"):
            is_new = time.time() - left.stat().st_mtime < _NEW_S  # it may not be locked yet
            if not is_new and not is_held(left):  # its process was killed
                shutil.rmtree(left, ignore_errors=True)
        _folder = root() / f"{COPY}{os.urandom(8).hex()}"
        lock(_folder)  # until this process ends
        atexit.register(_delete, _folder, os.getpid())
    return _folder


def _delete(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)
