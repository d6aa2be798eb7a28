"""One checkpoint's file: whole or not there when it is written, verified when it is read, running no code."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from pickle import UnpicklingError

import torch

from runnerkit.storage.atomic_file import AtomicFile
from runnerkit.storage.plain_state import as_plain, foreign_types
from runnerkit.types import StateDict

REST = "rest.pth"  # what a sharded checkpoint holds beside shards


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
        path: a file, or the folder of a sharded one.
        whole: put a sharded one's tensors together; False leaves them out.
    Raises:
        FileNotFoundError: nothing is there.
        ValueError: the file is torn or a bit of it flipped, or it is no checkpoint of tensors and plain values.
    """
    path = Path(path)
    if _is_sharded(path):
        from runnerkit.storage import shards  # a second's import that few need

        rest = load_checkpoint(path / REST)
        return shards.load(rest, path) if whole else rest
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    return load_file(path)


def is_checkpoint(path: Path) -> bool:
    """Whether `path` is a file, or a sharded checkpoint; no folder of them."""
    return path.is_file() or _is_sharded(path)


def _is_sharded(path: Path) -> bool:
    return (path / REST).is_file()


def load_file(path: Path, *, mapped: bool = False) -> StateDict:
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
