"""Record of the values sent to a service, kept in the logdir so that a resumed run sends nothing twice."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import IO

from runnerkit.logger import Step
from runnerkit.loggers.files.log_folder import claim_folder
from runnerkit.storage.atomic_file import remove_leftovers, write_text

Place = tuple[int, int]  # epoch, training steps so far


class Ledger:
    """File with the run's id at the service and the last place (epoch and step) at which each name was sent.

    Services cannot delete single points. The points that a killed run sent after its checkpoint therefore stay, and
    the resumed run does not send them again. A name that is logged twice at one place is sent once.

    Args:
        folder: created by :meth:`open`.

    Attributes:
        run_id: None until the service assigns one.
        num_sent: number of sends so far, those before a resume included.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ledger.jsonl"
        self.run_id: str | None = None
        self.num_sent = 0
        self._places: dict[str, Place] = {}
        self._unwritten: list[str] = []
        self._file: IO[str] | None = None

    def open(self, *, is_resumed: bool) -> None:
        """Read the record of the earlier parts of the run.

        Raises:
            FileExistsError: the logdir holds the record of another run and this run does not resume it.
        """
        earlier = [self.path] if os.path.lexists(self.path) else []
        claim_folder(self.path.parent, logdir=self.path.parent.parent, earlier_logs=earlier, is_resumed=is_resumed)
        remove_leftovers(self.path)
        if earlier:
            self._read()

    def start(self, run_id: str) -> None:
        """Record the run's id, before anything is sent."""
        self.run_id = run_id
        # One line summarizes all earlier sends, so the file does not grow with each start.
        notes = [{"run_id": run_id}, {"num_sent": self.num_sent, "places": self._places}]
        write_text(self.path, "".join(json.dumps(note) + "\n" for note in notes))
        self._file = self.path.open("a", encoding="utf-8")

    def unsent(self, names: Iterable[str], *, step: Step) -> list[str]:
        """Return the names that were not sent at this step or a later one."""
        place = (step.epoch, step.batch)
        return [name for name in names if self._places.get(name, (-1, -1)) < place]

    def note(self, names: list[str], *, step: Step) -> None:
        """Note that the names were sent or are queued for sending; :meth:`write` stores it."""
        self._add(names, (step.epoch, step.batch))
        self._unwritten.append(json.dumps([step.epoch, step.batch, names]) + "\n")

    def write(self) -> None:
        """Write the notes to the file, after the values were sent; a run killed in between sends these values again."""
        if self._unwritten and self._file is not None:
            self._file.write("".join(self._unwritten))
            self._file.flush()
            self._unwritten.clear()

    def furthest(self) -> Place:
        """Return the last place of all names."""
        return max(self._places.values(), default=(0, 0))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, names: list[str], place: Place) -> None:
        self.num_sent += 1
        self._places |= dict.fromkeys(names, place)

    def _read(self) -> None:
        first, second, *lines = self.path.read_text(encoding="utf-8").splitlines(keepends=True)
        self.run_id = json.loads(first)["run_id"]
        before = json.loads(second)
        self.num_sent = before["num_sent"]
        self._places = {name: tuple(place) for name, place in before["places"].items()}
        for line in lines:
            if line.endswith("\n"):  # a kill may have truncated the last line
                epoch, batch, names = json.loads(line)
                self._add(names, (epoch, batch))
