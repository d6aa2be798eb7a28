"""The status file of a run, kept up to date by a thread: a step neither writes it nor waits for it."""

from __future__ import annotations

import logging
import os
import socket
import threading
import traceback
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from runnerkit.loop.attributes import ProcessState
from runnerkit.storage import claims
from runnerkit.storage.atomic_file import remove_leftovers
from runnerkit.storage.status_file import FILE, State, Status, now
from runnerkit.support.redaction import redacted

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

log = logging.getLogger(__name__)

EVERY_S = 5.0  # between two updates
_LONGEST_MESSAGE = 10_000  # characters


class RunStatus(ProcessState):
    """Writer of ``status.json`` in the logdirs of a run, which are open on rank zero only.

    The thread reads counters of the runner, which are Python numbers, and the metrics of ended passes. It holds the
    runner until the run ends.
    """

    def __init__(self) -> None:
        self._metrics: Mapping[str, Mapping[str, float]] = {}
        self._logdirs: list[Path] = []
        self._started_at = ""
        self._end: threading.Event | None = None  # made late, as a run that has not begun is pickled
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def open(self, runner: IRunner, logdirs: Iterable[Path]) -> None:
        """Write that the run has started, and begin to update the files."""
        self._logdirs, self._started_at = list(logdirs), now()
        if not self._logdirs:
            return
        for logdir in self._logdirs:
            with suppress(OSError):
                remove_leftovers(logdir / FILE)
        status = self._status_of(runner, "running")
        self._write(status)
        self._end = threading.Event()
        arguments = (runner, self._end, status)
        self._thread = threading.Thread(target=self._update, args=arguments, name="runnerkit-status", daemon=True)
        self._thread.start()

    def note_metrics(self, key: str, metrics: Mapping[str, float]) -> None:
        """Note the metrics of a pass over the loader `key`."""
        self._metrics = {**self._metrics, key: metrics}  # a new dict, as the thread may be reading the other one

    def close(self, runner: IRunner, error: BaseException | None) -> None:
        """Write how the run ended."""
        if self._thread is None or self._end is None:
            return
        self._end.set()
        self._thread.join()
        self._thread = self._end = None
        is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        state: State = "finished" if error is None else "stopped" if is_stopped else "failed"
        self._write(self._status_of(runner, state, error))

    def _update(self, runner: IRunner, end: threading.Event, status: Status) -> None:
        while not end.wait(EVERY_S):
            status = self._seen(runner) or replace(status, updated_at=now())
            self._write(status)
            for logdir in self._logdirs:
                with suppress(Exception):  # raised in the run's thread as well
                    claims.flush(logdir)

    def _seen(self, runner: IRunner) -> Status | None:
        """Return the status; None while the runner's attributes are those of an evaluation, or are being exchanged."""
        with suppress(AttributeError):
            was_own = runner.current_run.status is self
            status = self._status_of(runner, "running")
            return status if was_own and runner.current_run.status is self else None
        return None

    def _status_of(self, runner: IRunner, state: State, error: BaseException | None = None) -> Status:
        return Status(
            state=state,
            pid=os.getpid(),
            host=socket.gethostname(),
            started_at=self._started_at,
            updated_at=now(),
            stage=runner.stage_key,
            loader=runner.loader_key or None,
            epoch=runner.epoch_step,
            stage_epoch=runner.stage_epoch_step,
            num_epochs=runner.stage_epoch_len,
            step=runner.batch_step,
            optimizer_step=runner.optimizer_step,
            num_steps=runner.current_run.stage.num_steps,
            metrics={key: dict(metrics) for key, metrics in self._metrics.items()},
            error=None if error is None else {"type": type(error).__name__, "message": _message_of(error)},
        )

    def _write(self, status: Status) -> None:
        """Write the files; a failure is reported once and does not end the run."""
        for logdir in self._logdirs:
            try:
                status.write(logdir)
            except Exception as error:
                if not self._has_warned:
                    self._has_warned = True
                    log.warning("%s was not written: %s", logdir / FILE, error)


def _message_of(error: BaseException) -> str:
    """Return the last lines of the traceback, without credentials: type, message and notes."""
    text: str = redacted("".join(traceback.format_exception_only(error)).strip())
    return text[:_LONGEST_MESSAGE]
