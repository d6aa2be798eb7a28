"""A run that stands still tells where each process stands, and ends."""

from __future__ import annotations

import faulthandler
import os
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING

from runnerkit.arguments import check_numbers
from runnerkit.callback import Callback, CallbackOrder
from runnerkit.exit_codes import STOOD_STILL

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

_LATER_S = 5.0  # for a thread of Python's, before one that needs no interpreter takes over


class HangCallback(Callback):
    """End the run if no batch ends for a long time: print the stack of every thread of every process, then exit.

    All processes stand still when one does, so each prints its own: the one that is not in a collective is the culprit.
    An evaluation is watched too, a callback of an epoch's or a stage's end as well, and in it each batch of a pass over
    a loader (batch norm's statistics, which SWACallback renews). While a stage is made, by `get_loaders`, `get_model`
    and so on, up to its ``on_stage_start``, nothing is watched.

    Args:
        timeout_s: longer than the slowest step, the first (which compiles, and starts workers) and a checkpoint
            included.

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
    """A thread that looks whether something has moved.

    Attributes:
        moved_at: when something did, by the monotonic clock.
        ending: the stage whose last event has come; None while one is under way.
    """

    def __init__(self, timeout_s: float, runner: IRunner) -> None:
        self.moved_at = time.monotonic()
        self.ending: str | None = None
        self._timeout_s, self._runner = timeout_s, runner
        self._batch: tuple[str, int] | None = None
        self._stopped = threading.Event()
        threading.Thread(target=self._look, name="runnerkit-hang", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()
        faulthandler.cancel_dump_traceback_later()

    def _look(self) -> None:
        while not self._stopped.is_set():
            if self._is_between_stages() or self._is_at_another_batch():
                self.moved_at = time.monotonic()
            if self._is_between_stages():
                faulthandler.cancel_dump_traceback_later()
            else:
                # A thread of C, which acts also while somebody holds the interpreter's lock, and none of Python's runs.
                faulthandler.dump_traceback_later(self._timeout_s + _LATER_S, exit=True, file=2)
            if time.monotonic() - self.moved_at > self._timeout_s:
                self._end()
            self._stopped.wait(min(1.0, self._timeout_s / 4))
        faulthandler.cancel_dump_traceback_later()

    def _is_between_stages(self) -> bool:
        # The callbacks that end a stage come after this one: it is over when the runner makes the next.
        is_next = self._runner.stage_key != self.ending or self._runner.stage_epoch_step == 0
        return self.ending is not None and is_next

    def _is_at_another_batch(self) -> bool:
        # Looked at from here, it includes a callback's own pass over a loader, of which others hear nothing.
        before, self._batch = self._batch, (self._runner.loader_key, self._runner.loader_batch_step)
        return self._batch != before

    def _end(self) -> None:
        runner = self._runner
        sys.stderr.flush()
        where = (
            f"runnerkit: rank {runner.engine.rank} of {runner.engine.num_processes} has stood still for "
            f"{self._timeout_s:g} s in loader {runner.loader_key!r}, epoch {runner.epoch_step}, batch "
            f"{runner.loader_batch_step}, and ends; it stands here:\n"
        )
        # At once: faulthandler writes word by word, and other processes write to the same place at the same time.
        os.write(2, where.encode() + _stacks())
        os._exit(STOOD_STILL)


def _stacks() -> bytes:
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file=file, all_threads=True)
            file.seek(0)
            return file.read()
    except OSError as error:  # nowhere to write: then word by word
        faulthandler.dump_traceback(file=2, all_threads=True)
        return f"(not in one piece: {error})\n".encode()
