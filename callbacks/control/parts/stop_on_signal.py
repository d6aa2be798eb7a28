"""The end of a run after a signal or a number of hours."""

from __future__ import annotations

import logging
import signal
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NoReturn

from runnerkit.checkpoints.store import CheckpointStore
from runnerkit.loop.stop_signals import TIME_IS_UP, StopRequests, handling_stop_signals, stopped_by

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)


class StopOnSignal:
    """End the run after the current step or evaluation, once any process has received a stop signal.

    SIGTERM, SIGUSR1, SIGHUP and `max_hours` end it with exit code 75, SIGINT with 130. A CheckpointCallback with
    content "runner" asks after each step and epoch, saves, and calls :meth:`end`.

    Args:
        store: of its checkpoints, which the end of the run waits for.
    """

    def __init__(self, max_hours: float | None, store: CheckpointStore) -> None:
        self.max_hours = max_hours
        self.store = store
        self.number: int | None = None  # the signal to stop for, once all processes have agreed on it after a step
        self._requests = StopRequests()
        self._began_at = 0.0
        self._signals = ExitStack()

    def start_clock(self) -> None:
        """Start to count the hours."""
        self._began_at = time.monotonic()

    def listen(self) -> None:
        """Take notice of signals until :meth:`close`."""
        self.number, self._requests = None, StopRequests()
        self._signals.enter_context(handling_stop_signals(self._requests.ask))

    def after_step(self, runner: IRunner) -> int | None:
        """Return the signal to stop for; every rank must call, after every step."""
        if self.number is None:
            if self.max_hours is not None:
                self._ask_in_time(runner, self.max_hours)
            self.number = self._requests.due(runner.batch_step, runner.engine)
        return self.number

    def after_epoch(self, runner: IRunner) -> int | None:
        """Return the signal to stop for; None also if the run ends anyway; every rank must call: this gathers."""
        number = self.number
        if number is None:
            if self.max_hours is not None:
                self._ask_in_time(runner, self.max_hours)
            number = self._requests.agree(runner.batch_step, runner.engine)
        ends_stage = runner.need_early_stop or not runner.current_run.stage.budget.is_epoch_left(runner)
        return None if ends_stage and runner.stage_key == [*runner.stages][-1] else number

    def _ask_in_time(self, runner: IRunner, max_hours: float) -> None:
        is_up = time.monotonic() - self._began_at >= 3600 * max_hours
        if is_up and runner.engine.is_main_process and self._requests.number is None:  # a signal has its own exit code
            self._requests.ask(TIME_IS_UP)

    def end(self, runner: IRunner, number: int, *, why_not: str) -> NoReturn:
        """End the run; `why_not` says why nothing was saved, and is empty if something was; every rank must call."""
        self.store.wait(stored=True)
        runner.engine.barrier()  # the first rank to exit ends the others: wait until rank zero has written
        name = f"max_hours={self.max_hours:g}" if number == TIME_IS_UP else signal.Signals(number).name
        if runner.engine.is_main_process and not why_not:
            logger.warning("%s: saved a checkpoint and stopped after step %d", name, runner.batch_step)
        elif runner.engine.is_main_process:
            newest = self.store.newest()
            logger.warning(
                "%s: stopped after step %d without saving, because %s; a resumed run starts %s",
                name, runner.batch_step, why_not,
                f"from {newest}" if newest else "from the beginning: there is no checkpoint yet",
            )  # fmt: skip
        raise stopped_by(number)

    def close(self) -> None:
        """Give signals back to whom they went before; safe to call twice."""
        self._signals.close()
