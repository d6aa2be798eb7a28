"""A run's folder of checkpoints with its index, and the search for the checkpoint that a run resumes from.

Every checkpoint is a separate file that never changes; ``index.json``, replaced atomically, lists the ones in use and
their checksums. ``last.pth`` and ``best.pth`` are aliases of two of them. So a kill at any moment leaves a folder
whose index and files are consistent. A sharded checkpoint
(:mod:`runnerkit.checkpoints.sharded`) is a folder instead of a file.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from runnerkit.checkpoints.fault import (
    fault_of,
    fault_of_bytes,
    fault_of_content,
    record_of,
    without_path,
)
from runnerkit.checkpoints.file import REST, is_checkpoint, load_checkpoint, save_checkpoint
from runnerkit.checkpoints.index import DamagedIndex, Record, place_of, read_index, to_json
from runnerkit.checkpoints.pretrained_folder import pretrained_weights
from runnerkit.storage.atomic_file import AtomicFile, sync, unwritable, write_text
from runnerkit.storage.checksum import sha256_of
from runnerkit.storage.claims import readable
from runnerkit.storage.links import refuse_link
from runnerkit.storage.remote.urls import as_url, local_path, shown
from runnerkit.types import StateDict

logger = logging.getLogger(__name__)


def export_full_state(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Save a sharded checkpoint as an ordinary file, from which any engine can resume; this process needs enough
    memory for all of it.

    Args:
        path: the checkpoint, or a logdir (its newest good one).
        out: the file, such as "whole.pth", or its URL.
    Raises:
        FileNotFoundError, ValueError: as :func:`find_checkpoint` and :func:`load_checkpoint`.
    """
    return save_checkpoint(load_checkpoint(find_checkpoint(path)), out)


class CheckpointFolder:
    """Checkpoints of one run, oldest first in ``index.json``.

    Args:
        folder: created when the first checkpoint is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.is_rebuilt = False  # from the files, because there was no index
        self._unread: dict[str, str] = {}  # why files were left out of it
        try:
            self.records = read_index(self.folder / "index.json")
        except (FileNotFoundError, NotADirectoryError, DamagedIndex) as error:
            self.records = self._found()
            self.is_rebuilt = bool(self.records) or isinstance(error, DamagedIndex)
            if self.is_rebuilt:
                names = [record.name for record in self.records]
                logger.warning("%s: using the checkpoints in the folder instead, without scores: %s", error, names)

    def _found(self) -> list[Record]:
        """Find complete checkpoints without an index."""
        found = []
        for path in self.files():
            try:
                record = record_of(path)
            except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
                self._unread[path.name] = without_path(error, path)
                continue
            if fault := fault_of(path, record):
                self._unread[path.name] = fault
            else:
                found.append(record)
        return found

    def make(self) -> None:
        """Create the folder and check that it can be written to, before a run works for hours.

        Raises:
            OSError: it cannot be written to, or is a symbolic link.
        """
        refuse_link(self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def files(self) -> list[Path]:
        """List files and folders with a checkpoint's name, oldest first, in the index or not."""
        paths = [path for path in self.folder.glob("model.*") if place_of(path.name)]
        return sorted(paths, key=lambda path: place_of(path.name) or ())

    def add(self, name: str, state: StateDict, *, kind: str, epoch: int, batch: int, score: float | None,
            metrics: Mapping[str, dict[str, float]], stage: str | None = None,
            judged_by: dict[str, Any] | None = None) -> Record:  # fmt: skip
        """Write a checkpoint under a new name, then the index with it.

        Args:
            name: ends in ".pth"; otherwise it names a folder whose shards are already in :meth:`temporary`.
        """
        path = self.folder / name
        file = save_checkpoint(state, path if name.endswith(".pth") else self.temporary(name) / REST)
        size, checksum = file.stat().st_size, sha256_of(file)
        if file.name == REST:
            size += state["shards"]["size_bytes"]  # also of those on other machines, if the logdir is in a store
            self._put_in_place(name)
        record = Record(name, kind, epoch, batch, size, checksum, score, dict(metrics), stage, judged_by)
        self.records = [each for each in self.records if each.name != name] + [record]
        self._write_index()
        return record

    def temporary(self, name: str) -> Path:
        """Return the folder in which a checkpoint's shards are written before it has its name."""
        return self.folder / f".{name}.tmp"

    def _put_in_place(self, name: str) -> None:
        sync(self.temporary(name))
        if (self.folder / name).exists():  # of an earlier attempt: a folder cannot be replaced atomically
            self.records = [record for record in self.records if record.name != name]
            self._write_index()
            shutil.rmtree(self.folder / name)
        os.rename(self.temporary(name), self.folder / name)
        sync(self.folder)

    def set_alias(self, alias: str, record: Record) -> None:
        """Make `alias` another name of a checkpoint: "last.pth", a hard link if the file system has them; for a folder,
        a symbolic link "last"."""
        if not record.name.endswith(".pth"):
            _link(self.folder / alias, record.name)
            (self.folder / f"{alias}.pth").unlink(missing_ok=True)
            return
        link_or_copy(self.folder / record.name, self.folder / f"{alias}.pth")
        (self.folder / alias).unlink(missing_ok=True)

    def has_alias(self, alias: str) -> bool:
        """Return whether :meth:`set_alias` gave a checkpoint the name `alias`."""
        return (self.folder / f"{alias}.pth").exists() or (self.folder / alias).is_symlink()

    def drop_alias(self, alias: str) -> None:
        """Undo :meth:`set_alias`."""
        for name in (f"{alias}.pth", alias):
            (self.folder / name).unlink(missing_ok=True)

    def replace(self, records: list[Record]) -> None:
        """Write other records of the same checkpoints."""
        self.records = records
        self._write_index()

    def keep(self, records: list[Record]) -> None:
        """Delete all other checkpoints: first from the index, then from the disk."""
        names = {record.name for record in records}
        retired = [record for record in self.records if record.name not in names]
        if retired:
            self.records = [record for record in self.records if record.name in names]
            self._write_index()
        for record in retired:
            remove(self.folder / record.name)

    def set_aside(self, names: set[str], *, ending: str) -> None:
        """Drop checkpoints from the index; then their files get another ending."""
        self.records = [record for record in self.records if record.name not in names]
        self._write_index()
        for path in (self.folder / name for name in sorted(names)):
            if path.exists():
                aside = path.with_name(f"{path.name}{ending}")
                remove(aside)
                os.rename(path, aside)

    def newest_good(self) -> Path:
        """Find the newest complete checkpoint to resume from.

        Raises:
            FileNotFoundError: there is none.
        """
        faults = dict(self._unread)
        for record in reversed([record for record in self.records if record.kind == "runner"]):
            path = self.folder / record.name
            if (fault := fault_of(path, record)) is None:
                return path
            faults[record.name] = fault
            logger.warning("checkpoint %s %s; trying the one before it", path, fault)
        hint = (
            "its checkpoints hold weights only (content='model')" if self.records else "it does not contain checkpoints"
        )
        if faults:
            hint = "; ".join(f"{name} {fault}" for name, fault in faults.items())
        raise FileNotFoundError(f"nothing to resume from in {shown(self.folder)}: {hint}")

    def named(self, alias: str) -> Path:
        """Find the checkpoint that :meth:`set_alias` named `alias`: "best" or "last".

        Raises:
            FileNotFoundError: there is none.
            ValueError: it does not match the index, or cannot be loaded.
        """
        path = next(filter(is_checkpoint, (self.folder / f"{alias}.pth", self.folder / alias)), None)
        if path is None:
            have = ", ".join(record.name for record in self.records) or "none"
            hint = ""
            if alias == "best" and self.records:
                hint = "; without a monitor, a run selects no best one: pass which='last'"
            raise FileNotFoundError(
                f"no checkpoint is called {alias!r} in {shown(self.folder)}; its checkpoints: {have}{hint}"
            )
        if path.is_symlink():
            path = self.folder / path.readlink()  # a running job may point the link elsewhere while it is read
        if all(fault_of_bytes(path, record) for record in self.records):
            raise ValueError(f"{shown(path)} is damaged: its size and checksum match no checkpoint in index.json")
        if fault := fault_of_content(path):
            raise ValueError(f"{shown(path)} {fault}")
        return path

    def _write_index(self) -> None:
        refuse_link(self.folder)  # before files are deleted: it may have become a link
        write_text(self.folder / "index.json", to_json(self.records))


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Resolve the path to resume from: a checkpoint, or a logdir (its newest good one).

    Of a pretrained model's folder, which has weights only, return these.

    Raises:
        TypeError: it is not a path.
        FileNotFoundError: nothing is there.
    """
    path = readable(as_path(path))
    if is_checkpoint(path):
        return path
    if (weights := pretrained_weights(path)) is not None:
        return weights
    if not path.is_dir():
        raise FileNotFoundError(f"resume={shown(path)!r}: no such checkpoint or logdir")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return CheckpointFolder(folder).newest_good()


def as_path(resume: str | os.PathLike[str]) -> str | Path:
    """Convert the value of `resume` to an absolute path, or a URL.

    Raises:
        TypeError: it is not a path, or empty.
    """
    if not isinstance(resume, str | os.PathLike) or not os.fspath(resume):
        raise TypeError(
            f'resume={resume!r} is not a path: pass the path of a checkpoint or of a logdir, or "auto" to train, which '
            "resumes from its logdir if that has a checkpoint"
        )
    return as_url(resume) or local_path(resume)


def holds_checkpoint(logdir: Path) -> bool:
    """Check whether `logdir` has a checkpoint that a run can resume from."""
    return bool(CheckpointFolder(logdir / "checkpoints").records)


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def link_or_copy(path: Path, name: Path) -> None:
    """Make `name` a hard link to `path`, or a copy if the file system does not support that."""
    with AtomicFile(name) as temporary:
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


def _link(path: Path, target: str) -> None:
    with AtomicFile(path) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target, target_is_directory=True)
