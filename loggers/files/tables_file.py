"""CSV file of tables, which have several rows for each place of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from runnerkit.logger import Cell, Step
from runnerkit.loggers.files.table import format_rows, read_rows
from runnerkit.storage.atomic_file import appending, write_text

PLACE = ("stage", "loader", "epoch", "step")


class TablesFile:
    """Tables of one name in a CSV file, each with its place in the first columns.

    A second table at the same place is ignored, as in :class:`~runnerkit.loggers.files.table.Table`.

    Args:
        path: created with the first table; rows are appended to an existing file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header, *rows = (read_rows(path) if path.exists() else []) or [[]]
        self._columns = header
        self._places = {tuple(row[: len(PLACE)]) for row in rows}

    def add(self, table: Mapping[str, Sequence[Cell]], *, step: Step) -> None:
        """Write the rows; floats read back as the same floats.

        Raises:
            ValueError: the columns differ from those of earlier tables.
        """
        place = (step.stage, step.loader, str(step.epoch), str(step.batch))
        columns = [*PLACE, *table]
        if self._columns not in ([], columns):
            raise ValueError(
                f"columns of a table in {self.path} must stay {self._columns[len(PLACE) :]}, got {[*table]}"
            )
        if place in self._places:
            return
        rows = [[*place, *map(str, cells)] for cells in zip(*table.values(), strict=True)]
        header = [] if self._columns else [columns]
        self._columns = columns
        self._places.add(place)
        self.path.parent.mkdir(parents=True, exist_ok=True)  # a name may contain slashes
        with appending(self.path), self.path.open("ab") as file:
            file.write(format_rows([*header, *rows]))


def drop_tables_after(path: Path, step: Step, *, scope: str) -> None:
    """Restore the file to the tables at `step`; delete it if none is left."""
    header, *rows = read_rows(path) or [[]]
    kept = [row for row in rows if step.includes(int(row[2]), int(row[3]), loader=row[1], scope=scope)]
    if kept:
        write_text(path, format_rows([header, *kept]).decode())
    else:
        path.unlink()
