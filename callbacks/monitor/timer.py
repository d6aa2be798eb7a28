"""Timings of training steps: waiting for data, and computation."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from runnerkit.callback import Callback, CallbackOrder

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["TimerCallback"]


class TimerCallback(Callback):
    """Log seconds per batch and samples per second of this process.

    ``_timer/data_time`` is the wait for the batch, ``_timer/model_time`` the time to process it,
    ``_timer/batch_time`` their sum. The device is not synchronized: on a GPU, `model_time` is the time to queue the
    work, or the device's own time once the queue is full.

    >>> TimerCallback().provides
    ('_timer/data_time', '_timer/model_time', '_timer/batch_time', '_timer/_fps')
    """

    def __init__(self) -> None:
        # After the optimizer step.
        super().__init__(order=CallbackOrder.External)
        self.provides = ("_timer/data_time", "_timer/model_time", "_timer/batch_time", "_timer/_fps")
        self._waiting_since: dict[str, float] = {}  # by loader, since a validation may interrupt one
        self._working_since: dict[str, float] = {}

    def on_loader_start(self, runner: IRunner) -> None:
        self._waiting_since[runner.loader_key] = time.perf_counter()

    def on_batch_start(self, runner: IRunner) -> None:
        self._working_since[runner.loader_key] = time.perf_counter()

    def on_batch_end(self, runner: IRunner) -> None:
        key, now = runner.loader_key, time.perf_counter()
        waiting_since, working_since = self._waiting_since[key], self._working_since[key]
        batch_time = now - waiting_since
        values = (working_since - waiting_since, now - working_since, batch_time, runner.batch_size / batch_time)
        runner.batch_metrics.update(zip(self.provides, values, strict=True))
        self._waiting_since[key] = now

    def on_step_end(self, runner: IRunner) -> None:
        # Do not count a validation or checkpoint since the batch's end as waiting for data.
        self._waiting_since[runner.loader_key] = time.perf_counter()
