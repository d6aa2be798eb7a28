"""Detection of hangs: print the stacks of every process and exit."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.support.arguments import check_numbers
from runnerkit.support.exit_codes import STOOD_STILL

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["HangCallback"]

_OTHERS_S = 3.0  # time for the other processes to print, too: the first that exits ends the job
_C_THREAD_DELAY_S = 5.0  # head start of the Python thread over faulthandler's C thread


class HangCallback(Callback):
    """End the run if no batch ends for a long time: print the stack of every thread of every process, then exit.

    When one process hangs, all of them do, so each prints its own stacks: the one outside a collective is the culprit.
    Evaluation and callbacks at the end of an epoch or stage are monitored too, including each batch of a callback's own
    pass over a loader (SWACallback recomputes batch norm statistics). The setup of a stage, `get_loaders`, `get_model`
    and so on up to its ``on_stage_start``, is not monitored.

    Args:
        timeout_s: longer than the slowest step, including the first one (which compiles and starts workers) and any
            checkpoint.

    >>> HangCallback(timeout_s=600).timeout_s
    600
    """

    def __init__(self, timeout_s: float) -> None:
        super().__init__(order=CallbackOrder.Internal)
        check_numbers(self, above=0, timeout_s=timeout_s)
        self.timeout_s = timeout_s
        self._watch: _Watch | None = None

    def on_stage_start(self, runner: IRunner) -> None:
        if self._watch is None:
            self._watch = _Watch(self.timeout_s, runner)
        self._watch.moved_at = time.monotonic()
        self._watch.ending = None

    def on_batch_end(self, runner: IRunner) -> None:
        if self._watch is not None:
            self._watch.moved_at = time.monotonic()

    on_loader_start = on_epoch_start = on_epoch_end = on_batch_end

    def on_stage_end(self, runner: IRunner) -> None:
        self.on_batch_end(runner)
        if self._watch is not None:
            self._watch.ending = runner.stage_key

    def on_experiment_end(self, runner: IRunner) -> None:
        if self._watch is not None:
            self._watch.stop()
            self._watch = None

    on_exception = on_experiment_end


class _Watch:
    """A thread that checks for progress.

    Attributes:
        moved_at: time of the last progress, on the monotonic clock.
        ending: the stage whose last event was received; None while a stage is running.
    """

    def __init__(self, timeout_s: float, runner: IRunner) -> None:
        self.moved_at = time.monotonic()
        self.ending: str | None = None
        self._timeout_s, self._runner = timeout_s, runner
        self._batch: tuple[str, int] | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._poll, name="runnerkit-hang", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _poll(self) -> None:
        while not self._stopped.is_set():
            if self._is_between_stages() or self._is_at_another_batch():
                self.moved_at = time.monotonic()
            if self._is_between_stages():
                faulthandler.cancel_dump_traceback_later()
            else:
                # A C thread, which works even if the GIL is never released and no Python thread can run.
                faulthandler.dump_traceback_later(self._timeout_s + _C_THREAD_DELAY_S, exit=True, file=2)
            if time.monotonic() - self.moved_at > self._timeout_s:
                self._end()
            self._stopped.wait(min(1.0, self._timeout_s / 4))
        faulthandler.cancel_dump_traceback_later()

    def _is_between_stages(self) -> bool:
        # Other callbacks may run after this one's on_stage_end: the stage is over when the runner sets up the next.
        is_next = self._runner.stage_key != self.ending or self._runner.stage_epoch_step == 0
        return self.ending is not None and is_next

    def _is_at_another_batch(self) -> bool:
        # Polling also sees a callback's own pass over a loader, which triggers no events.
        before, self._batch = self._batch, (self._runner.loader_key, self._runner.loader_batch_step)
        return self._batch != before

    def _end(self) -> None:
        runner = self._runner
        sys.stderr.flush()
        where = (
            f"runnerkit: rank {runner.engine.rank} of {runner.engine.num_processes} has made no progress for "
            f"{self._timeout_s:g} s in loader {runner.loader_key!r}, epoch {runner.epoch_step}, batch "
            f"{runner.loader_batch_step}; exiting with the stack of every thread:\n"
        )
        # A single write: faulthandler writes piece by piece, and other processes write to stderr at the same time.
        os.write(2, where.encode() + _stacks())
        if runner.engine.num_processes > 1:
            time.sleep(_OTHERS_S)
        os._exit(STOOD_STILL)


def _stacks() -> bytes:
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read()
    except OSError as error:  # no temporary file: write piece by piece
        faulthandler.dump_traceback(file=2, all_threads=True)
        return f"(possibly interleaved: {error})\n".encode()
