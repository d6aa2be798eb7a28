"""Files of a logdir on this machine: which there are, whether they changed, and their download."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from runnerkit.storage.remote.manifest import CHECKPOINTS, Manifest, is_log
from runnerkit.storage.remote.store import Damaged, Store

logger = logging.getLogger(__name__)

Mark: TypeAlias = tuple[int, int, int]  # inode, size and time of change: differs if the content does

_NUM_DOWNLOADS = 4  # at the same time


def files_of_checkpoints(staging: Path) -> Iterator[Path]:
    """Yield the files and links in the folder of checkpoints, except unfinished ones."""
    return _files(staging / CHECKPOINTS)


def logs_of(staging: Path) -> list[str]:
    """Return the names of all other files, sorted, except links and those of the staging folder itself."""
    files = (path for path in _files(staging) if not path.is_symlink())
    names = (path.relative_to(staging).as_posix() for path in files)
    return sorted(name for name in names if is_log(name) and not name.startswith("."))


def mark_of(path: Path) -> Mark | None:
    """Return what changes with a file's content; None if the file does not exist."""
    with suppress(FileNotFoundError):
        stat = path.stat()
        return stat.st_ino, stat.st_size, stat.st_mtime_ns
    return None


def link(path: Path, name: Path) -> None:
    """Give a file another name, or copy it if the file system does not have hard links."""
    if name.exists():
        return
    name.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(path, name)
    except OSError:
        shutil.copyfile(path, name)


def download(store: Store, manifest: Manifest, folder: Path) -> None:
    """Download the files of a manifest, except files that are missing or damaged, for example after a disk failure."""
    by_object: dict[str, list[str]] = {}
    sha256 = {entry.object: entry.sha256 for entry in manifest.checkpoints.values()}
    for name, entry in manifest.checkpoints.items():
        by_object.setdefault(entry.object, []).append(name)

    def get_object(name: str) -> None:
        first, *others = (folder / each for each in by_object[name])
        try:
            store.get(name, first, sha256=sha256[name])
        except (FileNotFoundError, Damaged) as error:
            logger.warning("%s/%s, of %s, is missing or damaged: %s", store.url, name, by_object[name][0], error)
            return
        for other in others:
            link(first, other)

    def get_log(name: str) -> None:
        try:
            store.get(name, folder / name)
        except FileNotFoundError:
            logger.warning("%s/%s is missing; the run continues without it", store.url, name)

    with ThreadPoolExecutor(_NUM_DOWNLOADS) as pool:
        downloads = [pool.submit(get_object, name) for name in by_object]
        downloads += [pool.submit(get_log, name) for name in manifest.logs]
        for each in downloads:
            each.result()
    for name, target in manifest.links.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target, target_is_directory=True)


def _files(folder: Path) -> Iterator[Path]:
    """Yield files and links, in order, except temporary ones."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            continue
        if path.is_dir() and not path.is_symlink():
            yield from _files(path)
        elif path.is_symlink() or path.is_file():
            yield path
