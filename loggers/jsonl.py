"""Logger that writes all metrics of a run to one JSON Lines file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import BinaryIO

from runnerkit.history.json_lines import FILE, format_line, read_lines
from runnerkit.logger import Scope, Step
from runnerkit.loggers.files.log_folder import FolderLogger, claim_folder
from runnerkit.storage.atomic_file import appending, check_folder
from runnerkit.storage.links import refuse_link

__all__ = ["JSONLLogger"]


class JSONLLogger(FolderLogger):
    """Logger that writes ``metrics.jsonl``: a line for each pass over a loader and, if asked, for each training step.

    The file is strict JSON: NaN and infinities are the strings "NaN", "Infinity", "-Infinity".
    ``runnerkit.read_metrics`` reads it if there are no CSV files. A metric that is logged twice at the same epoch and
    step keeps its first value, as in the CSV table.

    Args:
        logdir: created when the run starts.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.

    >>> import tempfile
    >>> logger = JSONLLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> logger.log_scalars({"loss": 0.5}, step=Step("train", "valid", epoch=1, batch=100), scope="loader")
    >>> print((logger.logdir / "metrics.jsonl").read_text().strip())
    {"scope": "loader", "stage": "train", "loader": "valid", "epoch": 1, "step": 100, "metrics": {"loss": 0.5}}
    >>> logger.close()
    """

    is_essential = True

    def __init__(
        self, logdir: str | os.PathLike[str], *, log_batch_metrics: bool = False, log_epoch_metrics: bool = True
    ) -> None:
        super().__init__(logdir, log_batch_metrics=log_batch_metrics, log_epoch_metrics=log_epoch_metrics)
        self._path = self.logdir / FILE
        self._file: BinaryIO | None = None
        self._place = (0, 0)  # epoch and step of the last line
        self._names: set[tuple[str, str, str]] = set()  # logged there: scope, loader, metric

    def setup(self, *, resumed_at: Step | None = None) -> None:
        self._place, self._names = (0, 0), set()
        earlier_logs = [self._path] if os.path.lexists(self._path) else []
        claim_folder(self.logdir, logdir=self.logdir, earlier_logs=earlier_logs, is_resumed=resumed_at is not None)
        if resumed_at is not None and earlier_logs:
            self._drop_after(resumed_at)

    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        new = {name: value for name, value in scalars.items() if not self._is_logged(scope, step, name)}
        if not new:
            return
        self._remember(scope, step, new)
        check_folder(self.logdir)
        with appending(self._path):
            if self._file is None:
                refuse_link(self._path)
                self._file = self._path.open("ab")
            self._file.write(format_line(scope, step, new))
            self._file.flush()  # one line at a time, so that a killed run leaves complete lines

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_logged(self, scope: Scope, step: Step, name: str) -> bool:
        return (step.epoch, step.batch) == self._place and (scope, step.loader, name) in self._names

    def _remember(self, scope: Scope, step: Step, metrics: Mapping[str, float]) -> None:
        if (step.epoch, step.batch) != self._place:
            self._place, self._names = (step.epoch, step.batch), set()
        self._names.update((scope, step.loader, name) for name in metrics)

    def _drop_after(self, last: Step) -> None:
        size_bytes = 0
        for (scope, step, metrics), end in read_lines(self._path):
            if not last.includes(step.epoch, step.batch, loader=step.loader, scope=scope):
                break  # lines are in the order of the run: all following ones are later
            self._remember(scope, step, metrics)
            size_bytes = end
        if size_bytes:
            os.truncate(self._path, size_bytes)
        else:
            self._path.unlink()
