"""Checks that the checkpoints of a logdir match its index and can be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runnerkit.checkpoints.fault import fault_of, main_file
from runnerkit.checkpoints.file import load_file
from runnerkit.checkpoints.index import Record, place_of, read_index
from runnerkit.commands.finding import Finding, Verdict
from runnerkit.resume.compatibility import check_format
from runnerkit.storage.checksum import sha256_of

FOLDER = "checkpoints"


def check_checkpoints(logdir: Path) -> Iterator[Finding]:
    """Read every checkpoint of a run once, without changing anything or executing pickled code."""
    folder = logdir / FOLDER
    if not folder.is_dir():
        yield Finding("note", FOLDER, "does not exist: nothing to resume from")
        return
    records, index = list[Record](), folder / "index.json"
    try:
        records = read_index(index) if index.exists() else records
    except (ValueError, OSError) as error:
        yield Finding("BROKEN", f"{FOLDER}/index.json", f"cannot be read ({error}): no checkpoint can be found")
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
        yield Finding("good", FOLDER, f"resuming would start from {good[-1].name}")
    elif any(record.kind == "runner" for record in records):
        yield Finding("BROKEN", FOLDER, "nothing to resume from: every checkpoint of the full state is broken")
    elif records:
        yield Finding("note", FOLDER, "weights only (content='model'): a run cannot resume from them")


def _check_index(folder: Path, records: list[Record]) -> Iterator[Finding]:
    if records:
        yield Finding("good", f"{FOLDER}/index.json", f"lists {len(records)} checkpoints")
    elif any(place_of(path.name) for path in folder.iterdir()):
        yield Finding("BROKEN", f"{FOLDER}/index.json", "does not list the checkpoints in this folder")
    else:
        yield Finding("note", FOLDER, "no checkpoint was completed: nothing to resume from")


def _defect(path: Path, record: Record) -> str | None:
    """Describe the defect of a checkpoint; None if it is intact."""
    fault = fault_of(path, record)
    if fault is None and record.kind == "runner":
        try:
            check_format(load_file(main_file(path), mapped=True), path)
        except ValueError as error:
            return str(error).removeprefix(f"{path} ")
    return fault


def _check_alias(folder: Path, alias: str, records: list[Record], defects: dict[str, str | None]) -> Iterator[Finding]:
    paths = [path for path in (folder / f"{alias}.pth", folder / alias) if path.exists() or path.is_symlink()]
    if paths:
        yield Finding(*_alias_finding(paths[0], records, defects))
    elif alias == "last" and records:
        yield Finding("note", f"{FOLDER}/last.pth", "does not exist: save_last=False, or the run was killed early")


def _alias_finding(path: Path, records: list[Record], defects: dict[str, str | None]) -> tuple[Verdict, str, str]:
    name = f"{FOLDER}/{path.name}"
    named = [record for record in records if _is_name(path, path.with_name(record.name))]
    record = next(iter(named or [record for record in records if _is_copy(path, record)]), None)
    if record is None:
        return "BROKEN", name, "is not an intact checkpoint of index.json"
    if defects[record.name] and named:
        return "BROKEN", name, f"is {record.name}, which is broken"
    if defects[record.name]:
        return "note", name, f"is an intact {record.name}: copy it to that name"
    if path.stem == "last" and record is not records[-1]:
        return "note", name, f"is {record.name}, not yet {records[-1].name}: the next save updates it"
    return "good", name, f"is {record.name}"


def _is_name(path: Path, checkpoint: Path) -> bool:
    return path.exists() and checkpoint.exists() and path.samefile(checkpoint)


def _is_copy(path: Path, record: Record) -> bool:
    """Check if `path` has the bytes of a checkpoint: file systems without links hold a copy."""
    return path.is_file() and path.stat().st_size == record.size_bytes and sha256_of(path) == record.sha256


def _check_leftovers(folder: Path, records: list[Record]) -> Iterator[Finding]:
    known = {record.name for record in records}
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") and path.name.endswith(".tmp"):
            yield Finding("note", f"{FOLDER}/{path.name}", "incomplete file of a killed run: delete it")
        elif records and place_of(path.name) and path.name not in known:
            yield Finding("note", f"{FOLDER}/{path.name}", "not in index.json, left by a killed run: delete it")
