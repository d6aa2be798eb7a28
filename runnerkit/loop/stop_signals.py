"""Stop requests: after a signal to any process, all processes save and stop after the same step."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from runnerkit.support.exit_codes import INTERRUPTED, PREEMPTED
from runnerkit.support.platform import ASKS_A_RUN, OwnHandler, signals

if TYPE_CHECKING:
    from runnerkit.engine import IEngine

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "RUNNERKIT_FOLDER"  # where the processes that runnerkit started record failures
SIGNALS = signals("SIGTERM", "SIGUSR1", "SIGINT", "SIGHUP")  # SIGHUP: the terminal was closed
TIME_IS_UP = 0  # in place of a signal's number
PASSED_ON = "passed on"  # file in the job's folder: the signal that the calling process received
_AGREE_EVERY_S = 1.0
_SAME_S = 1.0  # Slurm sends SIGTERM twice for one request


class Stopped(BaseException):
    """End of a run that was asked to stop, after a step: :class:`Preempted` or :class:`Interrupted`."""


class Preempted(Stopped, SystemExit):
    """Stop by SIGTERM, SIGUSR1 or SIGHUP; ends the script with exit code 75."""


class Interrupted(Stopped, SystemExit, KeyboardInterrupt):
    """Stop by SIGINT (Ctrl-C); ends the script with exit code 130, without a traceback."""


def stopped_by(number: int) -> Stopped:
    """Return the exception that ends the run after a signal."""
    return Interrupted(INTERRUPTED) if number == signal.SIGINT else Preempted(PREEMPTED)


class StopRequests:
    """Stop signals that this process received, and the agreement of all processes to stop.

    Processes exchange signals about once a second, at a step that they agreed on the time before. So no other step
    waits for the exchange, and all processes stop after the same step.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that this process received, or TIME_IS_UP
        self._next = 1
        self._agreed_at: tuple[int, float] | None = None  # step, and rank zero's clock

    def ask(self, number: int) -> None:
        """Record a signal."""
        self.number = number

    def due(self, step: int, engine: IEngine) -> int | None:
        """Return the signal to stop for after training step `step`; every rank must call, at every step.

        Args:
            step: counted over the whole run, the same on all ranks.
        """
        if engine.num_processes == 1:
            return self.number
        return self.agree(step, engine) if step >= self._next else None

    def agree(self, step: int, engine: IEngine) -> int | None:
        """Return the signal that any process received, or None; every rank must call: this gathers."""
        told = engine.gather_object((self.number, time.monotonic()))
        # A run may continue from a later step than 0, so the first agreement gives no speed.
        before, clock = self._agreed_at or (step, 0.0)
        steps_per_s = (step - before) / max(1e-6, told[0][1] - clock)
        self._next = step + max(1, int(steps_per_s * _AGREE_EVERY_S))
        self._agreed_at = step, told[0][1]
        return next((number for number, _ in told if number is not None), None)


@contextmanager
def handling_stop_signals(ask: Callable[[int], None]) -> Iterator[None]:
    """Log the first signal in the body and call `ask`; another one, over a second later, has its original effect.

    Signals that the user handles are left alone, and so are all signals outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in SIGNALS if _has_default_effect(handler := signal.getsignal(number))}
    owner = os.getpid()
    asked_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if os.getpid() != owner:
            # A loader's worker, just forked. Ctrl-C reaches it too, but the last step still needs its batches.
            if number != signal.SIGINT:
                os._exit(128 + number)
        elif asked_at is None:
            asked_at = time.monotonic()
            original = _passed_on()
            if original is None:
                _log_request(number)
            ask(original or number)
        elif number == signal.SIGINT or time.monotonic() - asked_at > _SAME_S:
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)  # os.kill would end the process on Windows, whatever the handler

    setattr(handle, ASKS_A_RUN, True)  # a loader's worker inherits the handler
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def pass_on(number: int, folder: Path) -> None:
    """Tell the processes of a job, which are sent SIGTERM, which signal the process that started them received."""
    (folder / PASSED_ON).write_text(str(number))


def _passed_on() -> int | None:
    """Return the signal received by the process that started this one; None without one, or if the user started it."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or not (path := Path(folder, PASSED_ON)).exists():
        return None
    return int(path.read_text())


def _log_request(number: int) -> None:
    words = (
        f"{signal.Signals(number).name}: the run stops after the current step or evaluation, and saves if it has a "
        "CheckpointCallback with content='runner'; send the signal again to stop at once"
    )
    # In a thread: this one may be in the middle of writing to the same stream.
    threading.Thread(target=logger.warning, args=(words,), name="runnerkit-signal").start()


def _has_default_effect(handler: Any) -> bool:
    return handler in (signal.SIG_DFL, signal.default_int_handler) or isinstance(handler, OwnHandler)
