"""Files that are whole or not there: atomic saving, verified loading, and a folder of checkpoints with an index.

Every checkpoint is a file of its own that never changes; ``index.json``, replaced as a whole, says which ones count and
their checksums. ``last.pth`` and ``best.pth`` are further names of two of them. So a kill at any moment leaves a folder
whose index and files fit together. A sharded checkpoint (:mod:`runnerkit.shards`) is a folder in the place of a file.
"""

import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Mapping
from copy import copy as shallow_copy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from runnerkit.types import StateDict
from runnerkit.version import __version__

logger = logging.getLogger(__name__)

_REST = "rest.pth"  # what a sharded checkpoint holds beside shards
_INDEX_VERSION = 1


def save_checkpoint(state: StateDict, path: str | os.PathLike[str]) -> Path:
    """Save `state` so that `path` holds either all of it or what was there before; synced to the disk.

    >>> import tempfile
    >>> path = save_checkpoint({"step": 3}, tempfile.mkdtemp() + "/a.pth")
    >>> load_checkpoint(path)
    {'step': 3}
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with AtomicFile(path) as temporary:
        torch.save(state, temporary)
    return path


def load_checkpoint(path: str | os.PathLike[str], *, whole: bool = True) -> StateDict:
    """Load a checkpoint to the CPU, running no code from it (``weights_only=True``).

    Args:
        whole: put a sharded one's tensors together; False leaves them out.
    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is torn, or no checkpoint of tensors and plain values.
    """
    path = Path(path)
    if _is_sharded(path):
        from runnerkit import shards  # a second's import that few need

        rest = load_checkpoint(path / _REST)
        return shards.load(rest, path) if whole else rest
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no whole checkpoint of tensors and plain values: {error}") from error


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


def _is_sharded(path: Path) -> bool:
    return (path / _REST).is_file()


class AtomicFile:
    """Context that gives a temporary path beside `path`, and puts it in place when the body went well."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self.temporary.unlink(missing_ok=True)
            return
        _sync(self.temporary)
        os.replace(self.temporary, self.path)
        _sync(self.path.parent)


def write_text(path: Path, text: str) -> None:
    """Replace a text file as a whole."""
    with AtomicFile(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass
class Record:
    """One checkpoint of a folder: which file, what it holds, and how good it was."""

    name: str
    kind: str  # "runner": all state; "model": a plain state_dict
    epoch: int
    batch: int
    size_bytes: int
    sha256: str
    score: float | None = None
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)


class CheckpointFolder:
    """Checkpoints of one run, oldest first in ``index.json``.

    Args:
        folder: made when the first checkpoint is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.records: list[Record] = []
        index = self.folder / "index.json"
        if index.is_file():
            content = json.loads(index.read_text(encoding="utf-8"))
            if content["format_version"] > _INDEX_VERSION:
                raise ValueError(f"{index} was written by a newer runnerkit than this, {__version__}: upgrade it")
            self.records = [Record(**record) for record in content["checkpoints"]]

    def add(self, name: str, state: StateDict, *, kind: str, epoch: int, batch: int, score: float | None,
            metrics: Mapping[str, dict[str, float]]) -> Record:  # fmt: skip
        """Write a checkpoint under a new name, then the index that knows it.

        Args:
            name: ends in ".pth"; any other is that of a folder, whose shards are in :meth:`temporary` by now.
        """
        path = self.folder / name
        file = save_checkpoint(state, path if name.endswith(".pth") else self.temporary(name) / _REST)
        size, checksum = _size(file.parent if file.name == _REST else file), _sha256(file)
        if file.name == _REST:
            self._put_in_place(name)
        record = Record(name, kind, epoch, batch, size, checksum, score, dict(metrics))
        self.records = [each for each in self.records if each.name != name] + [record]
        self._write_index()
        return record

    def temporary(self, name: str) -> Path:
        """Where the shards of a checkpoint are written before it has its name."""
        return self.folder / f".{name}.tmp"

    def _put_in_place(self, name: str) -> None:
        _sync(self.temporary(name))
        if (self.folder / name).exists():  # that of an earlier attempt: no folder is replaced as a whole
            self.records = [record for record in self.records if record.name != name]
            self._write_index()
            shutil.rmtree(self.folder / name)
        os.rename(self.temporary(name), self.folder / name)
        _sync(self.folder)

    def point(self, alias: str, record: Record) -> None:
        """Let `alias` be another name of a checkpoint: "last.pth", the same file where the file system can; of a folder
        a link, "last"."""
        if not record.name.endswith(".pth"):
            _link(self.folder / alias, record.name)
            (self.folder / f"{alias}.pth").unlink(missing_ok=True)
            return
        with AtomicFile(self.folder / f"{alias}.pth") as temporary:
            temporary.unlink(missing_ok=True)
            try:
                os.link(self.folder / record.name, temporary)
            except OSError:
                shutil.copyfile(self.folder / record.name, temporary)
        (self.folder / alias).unlink(missing_ok=True)

    def keep(self, records: list[Record]) -> None:
        """Forget and delete all other checkpoints: first in the index, then on the disk."""
        names = {record.name for record in records}
        retired = [record for record in self.records if record.name not in names]
        if retired:
            self.records = [record for record in self.records if record.name in names]
            self._write_index()
        for record in retired:
            path = self.folder / record.name
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def newest_good(self) -> Path:
        """Find the newest whole checkpoint to resume from.

        Raises:
            FileNotFoundError: there is none.
        """
        for record in reversed([record for record in self.records if record.kind == "runner"]):
            path = self.folder / record.name
            if _is_good(path, record):
                return path
            logger.warning("checkpoint %s is damaged or gone; taking the one before", path)
        hint = "its checkpoints hold weights only (mode='model')" if self.records else "it has no checkpoints"
        raise FileNotFoundError(f"nothing to resume from in {self.folder}: {hint}")

    def _write_index(self) -> None:
        records = [asdict(record) for record in self.records]
        text = json.dumps({"format_version": _INDEX_VERSION, "checkpoints": records}, indent=1)
        write_text(self.folder / "index.json", text)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Resolve what the user gave to resume from: a checkpoint, or a logdir (its newest good one).

    Raises:
        FileNotFoundError: nothing is there.
    """
    path = Path(path)
    if path.is_file() or _is_sharded(path):
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


def _is_good(path: Path, record: Record) -> bool:
    file = path / _REST if path.is_dir() else path
    if not file.is_file() or _size(path) != record.size_bytes or _sha256(file) != record.sha256:
        return False
    # The rest vouches for the shards.
    files = load_checkpoint(file)["shards"]["files"] if path.is_dir() else {}
    return all(_sha256(path / name) == checksum for name, checksum in files.items())


def _size(path: Path) -> int:
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size


def _link(path: Path, target: str) -> None:
    with AtomicFile(path) as temporary:
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target, target_is_directory=True)


def _sha256(path: Path) -> str:
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
        copy.update({key: copied(value, known=known) for key, value in state.items()})
        return copy
    if isinstance(state, list | tuple):
        return type(state)(copied(value, known=known) for value in state)
    return state


def as_plain(value: Any) -> Any:
    """Reduce a state to what ``weights_only`` loading accepts: enums and NumPy scalars become numbers."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_plain(item) for item in value) if not hasattr(value, "_fields") else tuple(value)
    if hasattr(value, "item") and not isinstance(value, torch.Tensor) and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value
