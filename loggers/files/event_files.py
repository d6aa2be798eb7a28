"""TensorBoard event files of one loader, truncated to the checkpoint when a run resumes.

``TensorboardLogger.setup`` imports this module, because TensorBoard is optional and slow to import.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from tensorboard.backend.event_processing.event_file_loader import (  # type: ignore[import-untyped]  # untyped
    RawEventFileLoader,
)
from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]  # untyped
from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # untyped
from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]  # untyped

from runnerkit.logger import Scope, Step
from runnerkit.storage.atomic_file import appending

_RECORD_FRAME_BYTES = 16  # framing of a TFRecord: length, its checksum, and the checksum of the data
_NAME = re.compile(r"events\.out\.tfevents\.\d+\..*")


class EventFiles:
    """Event files of one loader, in a separate folder.

    TensorBoard's ``purge_step``, which drops what a killed run logged after its checkpoint, compares the x of all tags
    of a folder, but a folder holds tags by epoch and tags by step. Each event therefore carries its epoch and step in
    a field that readers ignore, and :meth:`drop_after` truncates the files at the first event after the checkpoint.

    A tag that is logged twice at the same epoch and step keeps its first value, as in the CSV table.

    Args:
        folder: created with the first event.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._writer: EventFileWriter | None = None
        self._place = (0, 0)  # epoch and step of the last event
        self._tags: set[str] = set()  # logged there

    def add_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope, x: int) -> None:
        """Append numbers by tag; `x` is their position on TensorBoard's x-axis."""
        # One event for all numbers costs a tenth of one event for each.
        values = [Summary.Value(tag=tag, simple_value=each) for tag, each in scalars.items()]
        self.add(Summary(value=values), step=step, scope=scope, x=x)

    def add(self, summary: Summary, *, step: Step, scope: Scope, x: int) -> None:
        """Append the tags of `summary` that are not yet logged at `step`."""
        if (step.epoch, step.batch) == self._place:
            summary = Summary(value=[value for value in summary.value if value.tag not in self._tags])
        if not summary.value:
            return
        summary.value[0].node_name = f"{step.epoch}:{step.batch}:{scope}"
        with appending(self.folder):
            if self._writer is None:
                # Unpredictable, so that no one can plant a symbolic link there.
                self._writer = EventFileWriter(str(self.folder), filename_suffix=f".{os.urandom(8).hex()}")
            self._writer.add_event(Event(wall_time=time.time(), step=x, summary=summary))
        self._remember((step.epoch, step.batch), [value.tag for value in summary.value])

    def flush(self) -> None:
        if self._writer is not None:
            with appending(self.folder):
                self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            with appending(self.folder):
                writer.close()

    def drop_after(self, step: Step, *, loader: str) -> None:
        """Remove the events of a loader after `step`, and an incomplete last event of a killed run."""
        for path in sorted(self.folder.glob("*tfevents*")):
            size_bytes = 0
            for (epoch, batch, scope), tags, end in read_events(path):
                if not step.includes(epoch, batch, loader=loader, scope=scope):
                    break  # events are in the order of the run: all following ones are later
                self._remember((epoch, batch), tags)
                size_bytes = end
            os.truncate(path, size_bytes)
        self._put_before_now()

    def _put_before_now(self) -> None:
        # Readers sort files by name, and names contain the second of creation. If the clock was set back, or within
        # the same second, the next file would not sort last.
        paths = sorted(path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        now = int(time.time())
        if paths and int(_stamp(paths[-1])) >= now:
            for seconds, path in zip(range(len(paths), 0, -1), paths, strict=True):
                path.rename(path.with_name(path.name.replace(_stamp(path), f"{now - seconds:010d}", 1)))

    def _remember(self, place: tuple[int, int], tags: list[str]) -> None:
        if tags and place != self._place:
            self._place, self._tags = place, set()
        self._tags.update(tags)


def read_events(path: Path) -> Iterator[tuple[tuple[int, int, str], list[str], int]]:
    """Yield the (epoch, step, scope), the tags and the end offset in bytes of each event.

    Epoch and step are 0 if another program wrote the event. Reading stops at the first event that is incomplete
    or fails its checksum.
    """
    end = 0
    for record in RawEventFileLoader(str(path)).Load():
        summary = Event.FromString(record).summary
        end += len(record) + _RECORD_FRAME_BYTES
        yield _place_of(summary), [value.tag for value in summary.value], end


def _stamp(path: Path) -> str:
    return path.name.split(".")[3]


def _place_of(summary: Summary) -> tuple[int, int, str]:
    epoch, _, rest = summary.value[0].node_name.partition(":") if summary.value else ("", "", "")
    batch, _, scope = rest.partition(":")  # versions before 0.2 did not write a scope
    return int(epoch or 0), int(batch or 0), scope
