"""Checks that the CSV tables, JSON lines and TensorBoard events of a logdir are complete, ordered and unique."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from runnerkit.commands.finding import Finding
from runnerkit.history import json_lines
from runnerkit.loggers.files.table import PLACE

_NUM_LISTED = 3  # defects reported per file; the others are counted

Place = tuple[int, int]  # epoch, training steps so far


def check_logs(logdir: Path) -> Iterator[Finding]:
    """Check all logs of a run without changing them."""
    yield from _check_facts(logdir)
    for path in sorted(logdir.glob("csv/**/*.csv")):
        is_train = path == logdir / "csv" / "train.csv"
        yield from _found(logdir, path, _table_defects(path, is_train=is_train), good="rows in order")
    if (lines := logdir / json_lines.FILE).is_file():
        yield from _found(logdir, lines, _line_defects(lines), good="lines in order")
    events = sorted(logdir.glob("tensorboard/**/*tfevents*"))
    try:
        import runnerkit.loggers.files.event_files  # noqa: F401  # TensorBoard is optional
    except ImportError:
        if events:
            yield Finding("note", "tensorboard", "not checked: pip install runnerkit[tensorboard]")
        return
    for folder in sorted({path.parent for path in events}):
        yield from _check_events(logdir, [path for path in events if path.parent == folder])


def _check_facts(logdir: Path) -> Iterator[Finding]:
    import yaml

    readers: dict[str, Callable[[str], Any]] = {
        "hparams.yml": yaml.safe_load,
        "environment.json": json.loads,
        "status.json": json.loads,
    }
    for name, read in readers.items():
        path = logdir / name
        if path.is_file():
            try:
                read(path.read_text(encoding="utf-8"))
            except (ValueError, yaml.YAMLError) as error:
                yield Finding("BROKEN", name, f"cannot be read: {' '.join(str(error).split())}")
            else:
                yield Finding("good", name, "can be read")


def _found(logdir: Path, path: Path, defects: Iterator[str], *, good: str) -> Iterator[Finding]:
    name = path.relative_to(logdir).as_posix()
    listed = list(islice(defects, _NUM_LISTED))
    yield from (Finding("BROKEN", name, defect) for defect in listed)
    if num_more := sum(1 for _ in defects):
        yield Finding("BROKEN", name, f"and {num_more} more")
    if not listed:
        yield Finding("good", name, good)


def _table_defects(path: Path, *, is_train: bool) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *rows = list(csv.reader(file, strict=True)) or [[]]
    except (csv.Error, UnicodeDecodeError) as error:
        yield f"is not valid CSV: {error}"
        return
    if tuple(header[: len(PLACE)]) != PLACE or len(header) != len(set(header[len(PLACE) :])) + len(PLACE):
        yield f"its header must be {','.join(PLACE)} and unique metric names, got {header}"
        return
    order = _Order("row")
    stage, epoch = "", 0
    for number, row in enumerate(rows, start=2):
        where = f"line {number}"
        if len(row) != len(header):
            torn = ", incomplete: resuming drops it" if number == len(rows) + 1 else ""
            yield f"{where} has {len(row)} of {len(header)} cells{torn}"
            continue
        try:
            place = int(row[1]), int(row[2])
            [float(cell) for cell in row[len(PLACE) :] if cell]
        except ValueError as error:
            yield f"{where} has a cell that is not a number: {error}"
            continue
        yield from (f"{where}: {defect}" for defect in order.defects(place, [""]))
        if is_train and row[0] == stage and place[0] > epoch + 1:  # train runs in every epoch
            yield f"{where}: epoch {place[0]} follows epoch {epoch}: the epochs in between are missing"
        stage, epoch = row[0], place[0]


def _line_defects(path: Path) -> Iterator[str]:
    order = _Order("metric")
    end = 0
    for (scope, step, metrics), ends_at in json_lines.read_lines(path):
        end = ends_at
        yield from order.defects((step.epoch, step.batch), [f"{name} of {scope} {step.loader}" for name in metrics])
    yield from _torn(path, end)


class _Order:
    """Detector of logged steps that go backwards and of values logged twice at one step."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._place: Place = (0, 0)
        self._seen: set[str] = set()

    def defects(self, place: Place, names: list[str]) -> Iterator[str]:
        """Yield the defects of `names` at `place`, given the calls before."""
        if place != self._place:
            if place[0] < self._place[0] or place[1] < self._place[1]:
                yield f"goes back to {_describe_place(place)} from {_describe_place(self._place)}"
            self._place, self._seen = place, set()
        for name in names:
            if name in self._seen:
                yield f"{f'{self.what} {name}'.strip()} is logged twice at {_describe_place(place)}"
            self._seen.add(name)


def _describe_place(place: Place) -> str:
    return f"epoch {place[0]}, step {place[1]}"


def _check_events(logdir: Path, paths: list[Path]) -> Iterator[Finding]:
    order = _Order("tag")  # shared by all files: each start of a run writes a new one
    for path in paths:
        yield from _found(logdir, path, _event_defects(path, order), good="events in order")


def _event_defects(path: Path, order: _Order) -> Iterator[str]:
    from runnerkit.loggers.files.event_files import read_events

    end = 0
    for (epoch, step, _), tags, ends_at in read_events(path):
        end = ends_at
        if (epoch, step) != (0, 0):  # other writers do not log a place
            yield from order.defects((epoch, step), tags)
    yield from _torn(path, end)


def _torn(path: Path, end: int) -> Iterator[str]:
    size = path.stat().st_size
    if end != size:
        yield f"is truncated or damaged after {end} of {size} bytes: resuming cuts it there"
