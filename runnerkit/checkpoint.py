"""Files that are whole or not there: atomic saving, verified loading, and a folder of checkpoints with an index.

Every checkpoint is a file of its own that never changes; ``index.json``, replaced as a whole, says which ones count and
their checksums. ``last.pth`` and ``best.pth`` are further names of two of them. So a kill at any moment leaves a folder
whose index and files fit together.
"""

import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from runnerkit.types import StateDict

logger = logging.getLogger(__name__)


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


def load_checkpoint(path: str | os.PathLike[str]) -> StateDict:
    """Load a checkpoint to the CPU, running no code from it (``weights_only=True``).

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is torn, or no checkpoint of tensors and plain values.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
    except (RuntimeError, EOFError, pickle.UnpicklingError, ValueError, KeyError) as error:
        raise ValueError(f"{path} is no whole checkpoint of tensors and plain values: {error}") from error


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
            self.records = [Record(**record) for record in json.loads(index.read_text(encoding="utf-8"))["checkpoints"]]

    def add(self, name: str, state: StateDict, *, kind: str, epoch: int, batch: int, score: float | None,
            metrics: Mapping[str, dict[str, float]]) -> Record:  # fmt: skip
        """Write a checkpoint under a new name, then the index that knows it."""
        path = save_checkpoint(state, self.folder / name)
        record = Record(name, kind, epoch, batch, path.stat().st_size, _sha256(path), score, dict(metrics))
        self.records = [each for each in self.records if each.name != name] + [record]
        self._write_index()
        return record

    def point(self, alias: str, record: Record) -> None:
        """Let `alias` be another name of a checkpoint; the same file where the file system can."""
        with AtomicFile(self.folder / alias) as temporary:
            temporary.unlink(missing_ok=True)
            try:
                os.link(self.folder / record.name, temporary)
            except OSError:
                shutil.copyfile(self.folder / record.name, temporary)

    def keep(self, records: list[Record]) -> None:
        """Forget and delete all other checkpoints: first in the index, then on the disk."""
        names = {record.name for record in records}
        retired = [record for record in self.records if record.name not in names]
        if retired:
            self.records = [record for record in self.records if record.name in names]
            self._write_index()
        for record in retired:
            (self.folder / record.name).unlink(missing_ok=True)

    def newest_good(self) -> Path:
        """Find the newest whole checkpoint to resume from.

        Raises:
            FileNotFoundError: there is none.
        """
        for record in reversed([record for record in self.records if record.kind == "runner"]):
            path = self.folder / record.name
            if path.is_file() and path.stat().st_size == record.size_bytes and _sha256(path) == record.sha256:
                return path
            logger.warning("checkpoint %s is damaged or gone; taking the one before", path)
        hint = "its checkpoints hold weights only (mode='model')" if self.records else "it has no checkpoints"
        raise FileNotFoundError(f"nothing to resume from in {self.folder}: {hint}")

    def _write_index(self) -> None:
        text = json.dumps({"format_version": 1, "checkpoints": [asdict(record) for record in self.records]}, indent=1)
        write_text(self.folder / "index.json", text)


def find_checkpoint(path: str | os.PathLike[str]) -> Path:
    """Resolve what the user gave to resume from: a file, or a logdir (its newest good checkpoint).

    Raises:
        FileNotFoundError: nothing is there.
    """
    path = Path(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise FileNotFoundError(f"resume={str(path)!r}: no such checkpoint or logdir")
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    return CheckpointFolder(folder).newest_good()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def as_plain(value: Any) -> Any:
    """Reduce a state to what ``weights_only`` loading accepts: enums and NumPy scalars become numbers."""
    if isinstance(value, dict):
        return {key: as_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(as_plain(item) for item in value) if not hasattr(value, "_fields") else tuple(value)
    if hasattr(value, "item") and not isinstance(value, torch.Tensor) and getattr(value, "ndim", 1) == 0:
        return value.item()
    return value
