"""CSV table of metrics that grows row by row and stays complete if the run is killed."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from runnerkit.logger import Step
from runnerkit.storage.atomic_file import appending, write_text

PLACE = ("stage", "epoch", "step")


class Table:
    """Metrics of one loader in a CSV file; every row has a cell for every column, empty if the metric was not logged.

    A place (stage, epoch and step) has one row. A metric that is measured twice at one place keeps its first value,
    because the model did not change in between: for example, an evaluation every 100 steps and the one at the end of
    the epoch may both happen at step 100. A run that is killed and resumed therefore leaves the same table as an
    uninterrupted one.

    Args:
        path: created with the first row; rows are appended to an existing file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._start = 0  # where the last row begins, in bytes
        self._place: list[str] = []  # of the last row
        self._cells: dict[str, str] = {}  # of the last row, by metric
        self._metrics: list[str] = []
        if path.exists():
            header, *rows = read_rows(path)
            self._metrics = header[len(PLACE) :]
            if rows:
                self._place = rows[-1][: len(PLACE)]
                self._cells = dict(zip(self._metrics, rows[-1][len(PLACE) :], strict=True))
            self._open(rows)

    def add(self, scalars: Mapping[str, float], *, step: Step) -> None:
        """Write the numbers of one place without rounding: they read back as the same floats."""
        place = [step.stage, str(step.epoch), str(step.batch)]
        is_again = place == self._place
        earlier = self._cells if is_again else {}
        cells = {name: repr(float(value)) for name, value in scalars.items() if not earlier.get(name)}
        if not cells:
            return
        self._place, self._cells = place, {**earlier, **cells}
        late = [name for name in cells if name not in self._metrics]
        if late:
            self._add_columns(late, is_again=is_again)
            return
        assert self._file is not None
        if not is_again:
            self._start = self._file.seek(0, os.SEEK_END)
        with appending(self.path):
            self._file.seek(self._start)
            self._file.write(format_rows([self._last_row()]))  # overwrites the place's earlier row, which is not longer
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _last_row(self) -> list[str]:
        return [*self._place, *(self._cells.get(name, "") for name in self._metrics)]

    def _add_columns(self, late: list[str], *, is_again: bool) -> None:
        rows = read_rows(self.path)[1:] if self._file is not None else []
        rows = [[*row, *("" for _ in late)] for row in rows[: -1 if is_again else None]]
        self._metrics += late
        rows.append(self._last_row())
        self.path.parent.mkdir(parents=True, exist_ok=True)  # a loader's key may contain slashes
        write_text(self.path, format_rows([[*PLACE, *self._metrics], *rows]).decode())
        self._open(rows)

    def _open(self, rows: list[list[str]]) -> None:
        self.close()
        self._file = self.path.open("r+b")
        self._start = self._file.seek(0, os.SEEK_END) - len(format_rows(rows[-1:]))


def drop_rows_after(path: Path, step: Step, *, name: str) -> None:
    """Restore the table's rows and columns to those at `step`; delete the file if no row is left.

    Args:
        name: the loader's key and ".csv", or ".batch.csv" for a table of steps.
    """
    header, *rows = read_rows(path) or [[]]
    loader = name.removesuffix(".csv")
    scope = "batch" if loader.endswith(".batch") else "loader"
    rows = [row for row in rows if step.includes(int(row[1]), int(row[2]), loader=loader, scope=scope)]
    if not rows:
        path.unlink()
        return
    used = [column for column in range(len(header)) if column < len(PLACE) or any(row[column] for row in rows)]
    write_text(path, format_rows([row[column] for column in used] for row in [header, *rows]).decode())


def read_rows(path: Path) -> list[list[str]]:
    """Return the header and the complete rows."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    return [row for row in rows if len(row) == len(rows[0])]  # a power loss may have truncated the last one


def format_rows(rows: Iterable[Sequence[str]]) -> bytes:
    """Format rows as UTF-8 lines of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()
