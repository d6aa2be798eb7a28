"""Faults of a checkpoint, found by comparing it with its record in the index; and the creation of records."""

from __future__ import annotations

from pathlib import Path

from runnerkit.checkpoints.file import REST, load_checkpoint, load_file
from runnerkit.checkpoints.index import Record
from runnerkit.storage.checksum import sha256_of


def fault_of(path: Path, record: Record, *, quick: bool = False) -> str | None:
    """Describe the fault of a checkpoint, as "is damaged: ..."; None if it is complete and can be loaded.

    Args:
        record: its record in the index.
        quick: check only its size.
    """
    fault = fault_of_bytes(path, record, quick=quick)
    if quick or (fault and not path.is_dir()):
        return fault
    return fault_of_content(path) or fault  # which file of a folder is at fault says more than the folder's size


def fault_of_bytes(path: Path, record: Record, *, quick: bool = False) -> str | None:
    """Check only the bytes: their number, and the checksum in the index."""
    file = main_file(path)
    try:
        if not file.is_file():
            return "is missing"
        if (size := size_of(path)) != record.size_bytes:
            return f"is damaged: it has {size} bytes instead of {record.size_bytes}"
        is_intact = quick or sha256_of(file) == record.sha256
        return None if is_intact else f"is damaged: the checksum of {file.name} is wrong"
    except OSError as error:
        return f"cannot be read: {error}"


def fault_of_content(path: Path) -> str | None:
    """Check that a checkpoint can be loaded, and its shards' checksums."""
    try:
        state = load_file(main_file(path), mapped=True)
    except (OSError, ValueError) as error:
        return without_path(error, path)
    try:  # the rest holds the checksums of the shards
        for name, checksum in state["shards"]["files"].items() if path.is_dir() else ():
            if Path(name).name != name or not (path / name).is_file():
                return f"is damaged: shard {name} is missing"
            if sha256_of(path / name) != checksum:
                return f"is damaged: the checksum of shard {name} is wrong"
    except (OSError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged: {error}"
    return None


def main_file(path: Path) -> Path:
    """Return the file of a checkpoint that is not a shard: its only one, or the one with the shards' checksums."""
    return path / REST if path.is_dir() else path


def without_path(error: Exception, path: Path) -> str:
    """Return the message of an error about the main file of the checkpoint `path`, without the path."""
    file = main_file(path)
    words = str(error).removeprefix(f"{file} ")
    words = words if words != str(error) else f"cannot be read: {error}"
    return words if file == path else f"is damaged: {file.name} {words}"


def record_of(path: Path) -> Record:
    """Create a checkpoint's record for the index from its content, without its score.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: it is not complete.
    """
    file = main_file(path)
    state = load_checkpoint(file)
    counters = state.get("counters", {"epoch_step": 0, "batch_step": 0, "epoch_metrics": {}})
    return Record(
        path.name, "runner" if "format_version" in state else "model", counters["epoch_step"], counters["batch_step"],
        size_of(path), sha256_of(file), metrics=counters["epoch_metrics"],
    )  # fmt: skip


def size_of(path: Path) -> int:
    """Return the size in bytes of a checkpoint, which may be a folder."""
    return sum(each.stat().st_size for each in path.iterdir()) if path.is_dir() else path.stat().st_size
