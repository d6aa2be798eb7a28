"""Whether a logdir's checkpoints are what its index says, and can be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runnerkit.commands.finding import Finding, Verdict
from runnerkit.resume_check import check_format
from runnerkit.storage.checkpoint_fault import sha256_of
from runnerkit.storage.checkpoint_file import load_checkpoint
from runnerkit.storage.checkpoint_index import Record, place_of, read_index

FOLDER = "checkpoints"


def check_checkpoints(logdir: Path) -> Iterator[Finding]:
    """Read every checkpoint of a run once; nothing is changed, and no code of theirs is run."""
    folder = logdir / FOLDER
    if not folder.is_dir():
        yield Finding("note", FOLDER, "there is none: nothing to resume from")
        return
    try:
        records = read_index(folder / "index.json")
    except FileNotFoundError:
        records = []
        yield from _check_index(folder, records)
    except (ValueError, OSError) as error:
        yield Finding("BROKEN", f"{FOLDER}/index.json", f"cannot be read ({error}): no checkpoint is found by it")
        records = []
    else:
        yield from _check_index(folder, records)
    defects = {record.name: _defect(folder / record.name, record) for record in records}
    for record in records:
        about = f"epoch {record.epoch}, step {record.batch}, {record.size_bytes} bytes"
        defect = defects[record.name]
        yield Finding("BROKEN" if defect else "good", f"{FOLDER}/{record.name}", defect or about)
    for alias in ("last", "best"):
        yield from _check_alias(folder, alias, records, defects)
    yield from _check_leftovers(folder, records)
    good = [record for record in records if record.kind == "runner" and not defects[record.name]]
    if good:
        yield Finding("good", FOLDER, f"a run resumes from {good[-1].name}")
    elif any(record.kind == "runner" for record in records):
        yield Finding("BROKEN", FOLDER, "nothing to resume from: no checkpoint of a whole run is good")
    elif records:
        yield Finding("note", FOLDER, "weights only (mode='model'): no run resumes from them")


def _check_index(folder: Path, records: list[Record]) -> Iterator[Finding]:
    if records:
        yield Finding("good", f"{FOLDER}/index.json", f"lists {len(records)} checkpoints")
    elif any(place_of(path.name) for path in folder.iterdir()):
        yield Finding("BROKEN", f"{FOLDER}/index.json", "lists none of the checkpoints that are there: none is found")
    else:
        yield Finding("note", FOLDER, "no checkpoint was finished: nothing to resume from")


def _defect(path: Path, record: Record) -> str | None:
    """Say what is wrong with a checkpoint; None if nothing is."""
    if not path.exists():
        return "is missing"
    try:
        if path.is_dir():
            return _folder_defect(path, record)
        return _file_defect(path, record.size_bytes, record.sha256) or _content_defect(path, record)
    except OSError as error:
        return f"cannot be read ({error})"


def _file_defect(path: Path, size_bytes: int | None, sha256: str) -> str | None:
    if not path.is_file():
        return "is missing"
    size = path.stat().st_size
    if size_bytes not in (None, size):
        return f"has {size} bytes of {size_bytes}: torn"
    return None if sha256_of(path) == sha256 else "other bytes than were written (checksum)"


def _folder_defect(path: Path, record: Record) -> str | None:
    rest = path / "rest.pth"
    defect = _file_defect(rest, None, record.sha256) or _content_defect(rest, record)
    if defect:
        return f"rest.pth {defect}"
    # The rest vouches for the shards.
    for name, checksum in load_checkpoint(rest)["shards"]["files"].items():
        if defect := _file_defect(path / name, None, checksum):
            return f"shard {name} {defect}"
    size = sum(each.stat().st_size for each in path.iterdir())
    return None if size == record.size_bytes else f"its files have {size} bytes of {record.size_bytes}"


def _content_defect(path: Path, record: Record) -> str | None:
    try:
        state = load_checkpoint(path)
        if record.kind == "runner":
            check_format(state, path)
    except ValueError as error:
        return str(error).removeprefix(f"{path} ")
    return None


def _check_alias(folder: Path, alias: str, records: list[Record], defects: dict[str, str | None]) -> Iterator[Finding]:
    paths = [path for path in (folder / f"{alias}.pth", folder / alias) if path.exists() or path.is_symlink()]
    if paths:
        yield Finding(*_judge_alias(paths[0], records, defects))
    elif alias == "last" and records:
        yield Finding("note", f"{FOLDER}/last.pth", "is not there (save_last=False, or a kill came before it)")


def _judge_alias(path: Path, records: list[Record], defects: dict[str, str | None]) -> tuple[Verdict, str, str]:
    name = f"{FOLDER}/{path.name}"
    named = [record for record in records if _is_name(path, path.with_name(record.name))]
    record = next(iter(named or [record for record in records if _is_copy(path, record)]), None)
    if record is None:
        return "BROKEN", name, "is none of the checkpoints in index.json, whole"
    if defects[record.name] and named:
        return "BROKEN", name, f"is {record.name}, which is broken"
    if defects[record.name]:
        return "note", name, f"is {record.name} and whole: copy it to that name"
    if path.stem == "last" and record is not records[-1]:
        return "note", name, f"is {record.name}, not yet {records[-1].name}: the next save moves it"
    return "good", name, f"is {record.name}"


def _is_name(path: Path, checkpoint: Path) -> bool:
    return path.exists() and checkpoint.exists() and path.samefile(checkpoint)


def _is_copy(path: Path, record: Record) -> bool:
    """Whether `path` has the bytes of a checkpoint: on a file system without links, a name is a copy."""
    return path.is_file() and path.stat().st_size == record.size_bytes and sha256_of(path) == record.sha256


def _check_leftovers(folder: Path, records: list[Record]) -> Iterator[Finding]:
    known = {record.name for record in records}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            yield Finding("note", f"{FOLDER}/{path.name}", "half a file, left by a killed run: delete it")
        elif records and place_of(path.name) and path.name not in known:
            yield Finding("note", f"{FOLDER}/{path.name}", "not in index.json, left by a killed run: delete it")
