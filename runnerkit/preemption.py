"""Stop requests: a signal to any process ends the run after a step, the same one in all processes, and saved."""

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

from runnerkit.exit_codes import INTERRUPTED, PREEMPTED

if TYPE_CHECKING:
    from runnerkit.engine import IEngine

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "RUNNERKIT_FOLDER"  # of a job whose processes runnerkit started, where they leave their failures
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)  # the last when a terminal is closed
_PASSED_ON = "passed on"  # file in the job's folder: the signal that the calling process got
_AGREE_EVERY_S = 1.0
_SAME_S = 1.0  # Slurm sends SIGTERM twice for one wish


class Stopped(BaseException):
    """The run was asked to stop, and did so after a step: :class:`Preempted` or :class:`Interrupted`."""


class Preempted(Stopped, SystemExit):
    """By SIGTERM, SIGUSR1 or SIGHUP; ends the script with exit code 75."""


class Interrupted(Stopped, SystemExit, KeyboardInterrupt):
    """By SIGINT, which is Ctrl-C; ends the script with exit code 130, without a traceback."""


def stopped_by(number: int) -> Stopped:
    """Make the exception that a signal ends the run with."""
    return Interrupted(INTERRUPTED) if number == signal.SIGINT else Preempted(PREEMPTED)


class StopRequests:
    """Whether a signal asked this process to stop, and whether all processes know.

    They tell each other about once a second, at a step on which they agreed the time before: so no other step waits
    because of it, and all stop after the same.
    """

    def __init__(self) -> None:
        self.number: int | None = None  # of the signal that this process got
        self._next = 1
        self._told_at = 0, 0.0  # step, and rank zero's clock

    def ask(self, number: int) -> None:
        """Note a signal."""
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
        """Return the signal that a process got, if one did; every rank must call: this gathers."""
        told = engine.gather_object((self.number, time.monotonic()))
        before, clock = self._told_at
        steps_per_s = (step - before) / max(1e-6, told[0][1] - clock)
        self._next = step + max(1, int(steps_per_s * _AGREE_EVERY_S))
        self._told_at = step, told[0][1]
        return next((number for number, _ in told if number is not None), None)


@contextmanager
def heeded(ask: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, log and call `ask` for the first signal; a second, a second later, does what it did before.

    Signals that the user handles are the user's; so are all outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: handler for number in SIGNALS if _is_free(handler := signal.getsignal(number))}
    owner = os.getpid()
    asked_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked_at
        if os.getpid() != owner:
            # A process just forked, a loader's worker. Ctrl-C reaches it too, and it has to serve the step that ends.
            if number != signal.SIGINT:
                os._exit(128 + number)
        elif asked_at is None:
            asked_at = time.monotonic()
            original = _passed_on()
            if original is None:
                _tell(number)
            ask(original or number)
        elif number == signal.SIGINT or time.monotonic() - asked_at > _SAME_S:
            signal.signal(number, before[signal.Signals(number)])
            os.kill(owner, number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def pass_on(number: int, folder: Path) -> None:
    """Let the processes of a job, which are sent SIGTERM, know which signal the process that started them got."""
    (folder / _PASSED_ON).write_text(str(number))


def _passed_on() -> int | None:
    """Return the signal that the process that started this one got, if runnerkit started it and it got one."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or not (path := Path(folder, _PASSED_ON)).exists():
        return None
    return int(path.read_text())


def _tell(number: int) -> None:
    words = (
        f"{signal.Signals(number).name}: the run ends after the step under way, or after the evaluation, and saves if "
        "it has a CheckpointCallback in mode 'runner'; send it again to end at once"
    )
    # In a thread: this one may be in the middle of writing to the same place.
    threading.Thread(target=logger.warning, args=(words,), name="runnerkit-signal").start()


def _is_free(handler: Any) -> bool:
    return handler in (signal.SIG_DFL, signal.default_int_handler) or getattr(handler, "is_runnerkits", False)
