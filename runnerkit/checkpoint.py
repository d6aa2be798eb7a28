"""Files that are whole or not there: atomic saving, verified loading, and a folder of checkpoints with an index.

Every checkpoint is a file of its own that never changes; ``index.json``, replaced as a whole, says which ones count and
their checksums. ``last.pth`` and ``best.pth`` are further names of two of them. So a kill at any moment leaves a folder
whose index and files fit together. A sharded checkpoint (:mod:`runnerkit.shards`) is a folder in the place of a file.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from copy import copy as shallow_copy
from copy import deepcopy
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from runnerkit.atomic_file import AtomicFile, sync, unwritable, write_text
from runnerkit.checkpoint_index import DamagedIndex, Record, place_of, read_index, to_json
from runnerkit.plain_state import as_plain, foreign_types
from runnerkit.types import StateDict

logger = logging.getLogger(__name__)

_REST = "rest.pth"  # what a sharded checkpoint holds beside shards
_INDEX_VERSION = 1


def save_checkpoint(state: StateDict, path: str | os.PathLike[str]) -> Path:
    """Save `state` so that `path` holds either all of it or what was there before; synced to the disk.

    Raises:
        TypeError: it holds what :func:`load_checkpoint` would refuse; its place is named.

    >>> import tempfile
    >>> path = save_checkpoint({"step": 3}, tempfile.mkdtemp() + "/a.pth")
    >>> load_checkpoint(path)
    {'step': 3}
    """
    path, state = Path(path), as_plain(state)
    path.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(path) as temporary, temporary.open("wb") as file:
        torch.save(state, file)  # to a file of Python's, which tells why it cannot be written
    return path


def load_checkpoint(path: str | os.PathLike[str], *, whole: bool = True) -> StateDict:
    """Load a checkpoint to the CPU, running no code from it (``weights_only=True``).

    Args:
        whole: put a sharded one's tensors together; False leaves them out.
    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is torn or a bit of it flipped, or it is no checkpoint of tensors and plain values.
    """
    path = Path(path)
    if _is_sharded(path):
        from runnerkit import shards  # a second's import that few need

        rest = load_checkpoint(path / _REST)
        return shards.load(rest, path) if whole else rest
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    return _load(path)


def export_full_state(path: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Save a sharded checkpoint as an ordinary file, which any engine resumes from; in this process, which needs the
    memory for all of it.

    Args:
        path: the checkpoint, or a logdir (its newest good one).
        out: the file, such as "whole.pth".
    Raises:
        FileNotFoundError, ValueError: as :func:`find_checkpoint` and :func:`load_checkpoint`.
    """
    return save_checkpoint(load_checkpoint(find_checkpoint(path)), out)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a file, or a sharded checkpoint; no folder of them."""
    return path.is_file() or _is_sharded(path)


def _is_sharded(path: Path) -> bool:
    return (path / _REST).is_file()


def _load(path: Path, *, mapped: bool = False) -> StateDict:
    """Load a file; `mapped` leaves its tensors on the disk, and unread."""
    try:
        if not mapped and (damaged := _damaged_part(path)) is not None:  # torch.load does not look at checksums
            raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)  # type: ignore[no-any-return]
    except OSError:
        raise
    except Exception as error:  # bytes that anybody may have written can make torch.load raise anything
        if isinstance(error, UnpicklingError) and (foreign := foreign_types(path)):  # its checksums are right
            raise ValueError(
                f"{path} holds {', '.join(foreign)}, which is not loaded, as it could run code: a checkpoint holds "
                "tensors and plain values only"
            ) from error
        raise ValueError(f"{path} is no whole checkpoint of tensors and plain values: {error}") from error


def _damaged_part(path: Path) -> str | None:
    if not zipfile.is_zipfile(path):
        return None  # torch's format of old, which has no checksums
    with zipfile.ZipFile(path) as file:
        return file.testzip()


class CheckpointFolder:
    """Checkpoints of one run, oldest first in ``index.json``.

    Args:
        folder: made when the first checkpoint is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.is_rebuilt = False  # from the files, for want of an index
        self._unread: dict[str, str] = {}  # what kept files from being in it then
        try:
            self.records = read_index(self.folder / "index.json")
        except (FileNotFoundError, NotADirectoryError, DamagedIndex) as error:
            self.records = self._found()
            self.is_rebuilt = bool(self.records) or isinstance(error, DamagedIndex)
            if self.is_rebuilt:
                names = [record.name for record in self.records]
                logger.warning("%s: in its place the checkpoints that are there, without scores: %s", error, names)

    def _found(self) -> list[Record]:
        """Look for whole checkpoints without an index."""
        found = []
        for path in self.files():
            try:
                record = record_of(path)
            except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
                self._unread[path.name] = _without_path(error, path / _REST if path.is_dir() else path)
                continue
            if fault := fault_of(path, record):
                self._unread[path.name] = fault
            else:
                found.append(record)
        return found

    def make(self) -> None:
        """Make the folder, and see that it can be written to: before a run works for hours.

        Raises:
            OSError: it cannot.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.folder).close()
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def files(self) -> list[Path]:
        """List what has a checkpoint's name, oldest first; in the index or not."""
        paths = [path for path in self.folder.glob("model.*") if place_of(path.name)]
        return sorted(paths, key=lambda path: place_of(path.name) or ())

    def add(self, name: str, state: StateDict, *, kind: str, epoch: int, batch: int, score: float | None,
            metrics: Mapping[str, dict[str, float]], stage: str | None = None) -> Record:  # fmt: skip
        """Write a checkpoint under a new name, then the index that knows it.

        Args:
            name: ends in ".pth"; any other is that of a folder, whose shards are in :meth:`temporary` by now.
        """
        path = self.folder / name
        file = save_checkpoint(state, path if name.endswith(".pth") else self.temporary(name) / _REST)
        size, checksum = _size(file.parent if file.name == _REST else file), sha256_of(file)
        if file.name == _REST:
            self._put_in_place(name)
        record = Record(name, kind, epoch, batch, size, checksum, score, dict(metrics), stage)
        self.records = [each for each in self.records if each.name != name] + [record]
        self._write_index()
        return record

    def temporary(self, name: str) -> Path:
        """Where the shards of a checkpoint are written before it has its name."""
        return self.folder / f".{name}.tmp"

    def _put_in_place(self, name: str) -> None:
        sync(self.temporary(name))
        if (self.folder / name).exists():  # that of an earlier attempt: no folder is replaced as a whole
            self.records = [record for record in self.records if record.name != name]
            self._write_index()
            shutil.rmtree(self.folder / name)
        os.rename(self.temporary(name), self.folder / name)
        sync(self.folder)

    def point(self, alias: str, record: Record) -> None:
        """Let `alias` be another name of a checkpoint: "last.pth", the same file where the file system can; of a folder
        a link, "last"."""
        if not record.name.endswith(".pth"):
            _link(self.folder / alias, record.name)
            (self.folder / f"{alias}.pth").unlink(missing_ok=True)
            return
        name_again(self.folder / record.name, self.folder / f"{alias}.pth")
        (self.folder / alias).unlink(missing_ok=True)

    def has_alias(self, alias: str) -> bool:
        """Whether :meth:`point` gave a checkpoint the name `alias`."""
        return (self.folder / f"{alias}.pth").exists() or (self.folder / alias).is_symlink()

    def drop_alias(self, alias: str) -> None:
        """Take back what :meth:`point` did."""
        for name in (f"{alias}.pth", alias):
            (self.folder / name).unlink(missing_ok=True)

    def keep(self, records: list[Record]) -> None:
        """Forget and delete all other checkpoints: first in the index, then on the disk."""
        names = {record.name for record in records}
        retired = [record for record in self.records if record.name not in names]
        if retired:
            self.records = [record for record in self.records if record.name in names]
            self._write_index()
        for record in retired:
            remove(self.folder / record.name)

    def set_aside(self, names: set[str], *, ending: str) -> None:
        """Let checkpoints not count any more: first in the index; then their files get another ending."""
        self.records = [record for record in self.records if record.name not in names]
        self._write_index()
        for path in (self.folder / name for name in sorted(names)):
            if path.exists():
                aside = path.with_name(f"{path.name}{ending}")
                remove(aside)
                os.rename(path, aside)

    def newest_good(self) -> Path:
        """Find the newest whole checkpoint to resume from.

        Raises:
            FileNotFoundError: there is none.
        """
        faults = dict(self._unread)
        for record in reversed([record for record in self.records if record.kind == "runner"]):
            path = self.folder / record.name
            if (fault := fault_of(path, record)) is None:
                return path
            faults[record.name] = fault
            logger.warning("checkpoint %s %s; looking for the one before", path, fault)
        hint = "its checkpoints hold weights only (mode='model')" if self.records else "it has no checkpoints"
        if faults:
            hint = "; ".join(f"{name} {fault}" for name, fault in faults.items())
        raise FileNotFoundError(f"nothing to resume from in {self.folder}: {hint}")

    def named(self, alias: str) -> Path:
        """Find the checkpoint that :meth:`point` gave a name to: "best", "last".

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is not what the index says, or holds what is not loaded.
        """
        path = next(filter(is_checkpoint, (self.folder / f"{alias}.pth", self.folder / alias)), None)
        if path is None:
            have = ", ".join(record.name for record in self.records) or "none"
            raise FileNotFoundError(f"no checkpoint is called {alias!r} in {self.folder}; its checkpoints: {have}")
        if all(_fault_of_bytes(path, record) for record in self.records):
            raise ValueError(f"{path} is damaged: size and checksum are those of no checkpoint in index.json")
        if fault := _fault_of_content(path):
            raise ValueError(f"{path} {fault}")
        return path

    def _write_index(self) -> None:
        write_text(self.folder / "index.json", to_json(self.records))


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Resolve what the user gave to resume from: a checkpoint, or a logdir (its newest good one).

    Raises:
        FileNotFoundError: nothing is there.
    """
    path = Path(path)
    if is_checkpoint(path):
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"resume={str(path)!r}: no such checkpoint or logdir")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return CheckpointFolder(folder).newest_good()


def resume_source(resume: str | os.PathLike[str] | None, *, logdir: Path | None) -> str | None:
    """Return what a run resumes from, or None; "auto" is `logdir`, if a checkpoint is there.

    Raises:
        FileNotFoundError, ValueError: there is none.
    """
    if resume is None:
        return None
    if resume != "auto":
        find_checkpoint(resume)
        return str(resume)
    if logdir is None:
        raise ValueError('resume="auto" looks in logdir: pass logdir=')
    return str(logdir) if CheckpointFolder(logdir / "checkpoints").records else None


def fault_of(path: Path, record: Record, *, quick: bool = False) -> str | None:
    """Tell what is wrong with a checkpoint, as "is damaged: ..."; None if it is whole and can be loaded.

    Args:
        record: what the index says of it.
        quick: look at its size only.
    """
    return _fault_of_bytes(path, record, quick=quick) or (None if quick else _fault_of_content(path))


def _fault_of_bytes(path: Path, record: Record, *, quick: bool = False) -> str | None:
    file = path / _REST if path.is_dir() else path
    try:
        if not file.is_file():
            return "is not there"
        if (size := _size(path)) != record.size_bytes:
            return f"is damaged: it has {size} bytes instead of {record.size_bytes}"
        return None if quick or sha256_of(file) == record.sha256 else "is damaged: its checksum is wrong"
    except OSError as error:
        return f"cannot be read: {error}"


def _fault_of_content(path: Path) -> str | None:
    file = path / _REST if path.is_dir() else path
    try:
        state = _load(file, mapped=True)
    except (OSError, ValueError) as error:
        return _without_path(error, file)
    try:  # the rest vouches for the shards
        files = state["shards"]["files"] if path.is_dir() else {}
        bad = [
            name for name, checksum in files.items() if Path(name).name != name or sha256_of(path / name) != checksum
        ]
    except (OSError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged: {error}"
    return f"is damaged: the checksum of {bad[0]} is wrong" if bad else None


def _without_path(error: Exception, path: Path) -> str:
    words = str(error).removeprefix(f"{path} ")
    return words if words != str(error) else f"cannot be read: {error}"


def record_of(path: Path) -> Record:
    """Describe a checkpoint for the index from what it holds, without its score.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it is no whole one.
    """
    file = path / _REST if path.is_dir() else path
    state = load_checkpoint(file)
    counters = state.get("counters", {"epoch_step": 0, "batch_step": 0, "epoch_metrics": {}})
    return Record(
        path.name, "runner" if "format_version" in state else "model", counters["epoch_step"], counters["batch_step"],
        _size(path), sha256_of(file), metrics=counters["epoch_metrics"],
    )  # fmt: skip


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size


def remove(path: Path) -> None:
    """Delete a file, a link or a whole folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def name_again(path: Path, name: Path) -> None:
    """Let `name` be the same file as `path`; a copy where the file system can do no better."""
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


def sha256_of(path: Path) -> str:
    """Compute a file's checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def copied(state: Any, *, known: dict[Any, torch.Tensor] | None = None) -> Any:
    """Copy a state to memory that nothing else uses, on the CPU; tensors that are one stay one.

    >>> weight = torch.zeros(2)
    >>> copy = copied({"a": weight, "b": weight})
    >>> _ = weight.add_(1)
    >>> copy["a"].tolist(), copy["a"] is copy["b"]
    ([0.0, 0.0], True)
    """
    known = {} if known is None else known
    if isinstance(state, torch.Tensor):
        identity = state.device, state.data_ptr(), state.dtype, state.shape, state.stride()
        if identity not in known or not state.numel():
            known[identity] = state.detach().to("cpu", copy=True)
        return known[identity]
    if isinstance(state, dict):
        copy = shallow_copy(state)  # with the versions of modules, which a model's state has as an attribute
        for key, value in state.items():  # a Counter's update() would add
            copy[key] = copied(value, known=known)
        return copy
    if isinstance(state, list | tuple):
        items = [copied(value, known=known) for value in state]
        return type(state)(*items) if hasattr(state, "_fields") else type(state)(items)
    return deepcopy(state)
