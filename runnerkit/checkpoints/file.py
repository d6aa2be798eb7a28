"""Checkpoint files: written atomically, verified when they are read, and loaded without running code."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch

from runnerkit.checkpoints.plain_state import as_plain, foreign_types
from runnerkit.storage.atomic_file import AtomicFile
from runnerkit.storage.claims import readable
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.types import StateDict

REST = "rest.pth"  # everything in a sharded checkpoint except the shards


def save_checkpoint(state: StateDict, path: str | os.PathLike[str]) -> Path:
    """Save `state` atomically: `path` holds either all of it or its previous content; synced to the disk.

    Args:
        path: of the file, or its URL.
    Raises:
        TypeError: it holds a value that :func:`load_checkpoint` would refuse; the message has its place.

    >>> import tempfile
    >>> path = save_checkpoint({"step": 3}, tempfile.mkdtemp() + "/a.pth")
    >>> load_checkpoint(path)
    {'step': 3}
    """
    state = as_plain(state)
    with written(path) as local:
        local.parent.mkdir(parents=True, exist_ok=True)
        with AtomicFile(local) as temporary, temporary.open("wb") as file:
            torch.save(state, file)  # to a Python file, whose error tells why it cannot be written
    return name_of(path)


def load_checkpoint(path: str | os.PathLike[str], *, whole: bool = True, mapped: bool = False) -> StateDict:
    """Load a checkpoint to the CPU, running no code from it (``weights_only=True``).

    Args:
        path: a file, or the folder of a sharded one; or its URL.
        whole: assemble the tensors of a sharded one; False leaves them out.
        mapped: map a file's tensors into memory, without verifying its checksums; they are read when they are used.
    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is truncated, has a flipped bit, or is not a checkpoint of tensors and plain values.
    """
    path = readable(path)
    if is_sharded(path):
        from runnerkit.checkpoints import sharded

        path = path.resolve()  # a running job may point "last" to another folder in between
        rest = load_checkpoint(path / REST)
        return sharded.load(rest, path) if whole else rest
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    return load_file(path, mapped=mapped)


def is_checkpoint(path: Path) -> bool:
    """Return whether `path` is a file or a sharded checkpoint, not a folder of checkpoints."""
    return path.is_file() or is_sharded(path)


def is_foreign(path: Path) -> bool:
    """Return whether `path` is a folder that another program wrote by ``torch.distributed.checkpoint``."""
    return (path / ".metadata").is_file() and not is_sharded(path)


def is_sharded(path: Path) -> bool:
    """Return whether `path` is a sharded checkpoint, a folder."""
    return (path / REST).is_file()


def load_file(path: Path, *, mapped: bool = False) -> StateDict:
    """Load a file; `mapped` maps its tensors into memory without reading them."""
    try:
        if not mapped and (damaged := _damaged_part(path)) is not None:  # torch.load does not verify checksums
            raise ValueError(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)  # type: ignore[no-any-return]
    except OSError:
        raise
    except Exception as error:  # torch.load may raise anything on bytes of unknown origin
        if isinstance(error, UnpicklingError) and (foreign := foreign_types(path)):  # its checksums are correct
            raise ValueError(
                f"{path} holds {', '.join(foreign)}, which is not loaded, as it could run code: a checkpoint holds "
                "tensors and plain values only"
            ) from error
        raise ValueError(f"{path} is not a complete checkpoint of tensors and plain values: {error}") from error


def _damaged_part(path: Path) -> str | None:
    if not zipfile.is_zipfile(path):
        return None  # torch's old format, without checksums
    with zipfile.ZipFile(path) as file:
        return file.testzip()
