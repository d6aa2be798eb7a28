"""What is wrong with a checkpoint, held against what the index says of it; and what the index is to say."""

from __future__ import annotations

import hashlib
from pathlib import Path

from runnerkit.storage.checkpoint_file import REST, load_checkpoint, load_file
from runnerkit.storage.checkpoint_index import Record


def fault_of(path: Path, record: Record, *, quick: bool = False) -> str | None:
    """Tell what is wrong with a checkpoint, as "is damaged: ..."; None if it is whole and can be loaded.

    Args:
        record: what the index says of it.
        quick: look at its size only.
    """
    return fault_of_bytes(path, record, quick=quick) or (None if quick else fault_of_content(path))


def fault_of_bytes(path: Path, record: Record, *, quick: bool = False) -> str | None:
    """Look at the bytes only: their number, and the checksum that the index has."""
    file = path / REST if path.is_dir() else path
    try:
        if not file.is_file():
            return "is not there"
        if (size := size_of(path)) != record.size_bytes:
            return f"is damaged: it has {size} bytes instead of {record.size_bytes}"
        return None if quick or sha256_of(file) == record.sha256 else "is damaged: its checksum is wrong"
    except OSError as error:
        return f"cannot be read: {error}"


def fault_of_content(path: Path) -> str | None:
    """Look at what the bytes say: whether it can be loaded, and its shards' checksums."""
    file = path / REST if path.is_dir() else path
    try:
        state = load_file(file, mapped=True)
    except (OSError, ValueError) as error:
        return without_path(error, file)
    try:  # the rest vouches for the shards
        files = state["shards"]["files"] if path.is_dir() else {}
        bad = [
            name for name, checksum in files.items() if Path(name).name != name or sha256_of(path / name) != checksum
        ]
    except (OSError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged: {error}"
    return f"is damaged: the checksum of {bad[0]} is wrong" if bad else None


def without_path(error: Exception, path: Path) -> str:
    """Say what an error says of `path`, without naming it again."""
    words = str(error).removeprefix(f"{path} ")
    return words if words != str(error) else f"cannot be read: {error}"


def record_of(path: Path) -> Record:
    """Describe a checkpoint for the index from what it holds, without its score.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it is no whole one.
    """
    file = path / REST if path.is_dir() else path
    state = load_checkpoint(file)
    counters = state.get("counters", {"epoch_step": 0, "batch_step": 0, "epoch_metrics": {}})
    return Record(
        path.name, "runner" if "format_version" in state else "model", counters["epoch_step"], counters["batch_step"],
        size_of(path), sha256_of(file), metrics=counters["epoch_metrics"],
    )  # fmt: skip


def size_of(path: Path) -> int:
    """Count the bytes of a checkpoint, which may be a folder."""
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size


def sha256_of(path: Path) -> str:
    """Compute a file's checksum."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
