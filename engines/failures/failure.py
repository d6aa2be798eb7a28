"""Failure reports that the processes of a job write for the process that started them."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any, Self

from torch.distributed import DistError

from runnerkit.engines.launch.exit_on_signal import ExitOnSignal
from runnerkit.engines.launch.parent import is_started_by_torchrun
from runnerkit.loop.stop_signals import FOLDER_VARIABLE
from runnerkit.support import pickling
from runnerkit.support.exit_codes import STOOD_STILL

__all__ = ["RankTraceback", "WorkerError"]

FAILED = "runnerkit/failed"  # key in the process group's store: a rank that has reported a cause
_LONGEST_SUMMARY, _LONGEST_TEXT, _LONGEST_MESSAGE = 2_000, 20_000, 100_000  # characters
_LARGEST_PICKLE = 1_000_000  # bytes


class WorkerError(RuntimeError):
    """A process of the job ended without an exception that can be re-raised: it was killed or called ``os._exit``."""


class PeerLostError(RuntimeError):
    """Another process of the job failed while this one waited for it."""


class RankTraceback(Exception):
    """Cause of an exception re-raised from another process: the original traceback, as text."""

    def __init__(self, rank: int, world_size: int, text: str) -> None:
        super().__init__(rank, world_size, text)
        self.rank = rank
        self.text = text

    def __str__(self) -> str:
        return f'rank {self.rank} of {self.args[1]}\n"""\n{self.text}"""'


@contextmanager
def no_silent_exit(rank: int, world_size: int) -> Iterator[None]:
    """Turn an exit with code 0 into an error: the run is not over and the other ranks still wait for this one.

    Raises:
        WorkerError: the body called ``sys.exit()`` or ``sys.exit(0)``.
    """
    try:
        yield
    except SystemExit as error:
        if error.code not in (None, 0):
            raise
        raise WorkerError(
            f"rank {rank} of {world_size} called sys.exit() before the run was over; raise an exception if something "
            "is wrong, or set runner.need_early_stop = True on every rank to end the run early"
        ) from error


@dataclass
class Failure:
    """A rank's exception, for the process that started it or for the other ranks.

    Attributes:
        time: time at which it was caught, on its machine's monotonic clock.
        summary: type and message of the exception.
        text: its traceback.
        pickled: the exception itself, sent through a folder that only this user can write; None if it is unpicklable.
        is_consequence: whether it only reports that another process is gone.
    """

    rank: int
    world_size: int
    time: float
    summary: str
    text: str
    pickled: bytes | None = None
    is_consequence: bool = False

    def write(self, folder: Path) -> None:
        """Write the report to `folder`; a later report of the same rank keeps the time of the first."""
        path = folder / f"failure.{self.rank}"
        if path.exists():
            self.time = pickling.loads(path.read_bytes()).time
        temporary = folder / f".failure.{self.rank}"
        temporary.write_bytes(pickling.dumps(self))
        temporary.replace(path)

    def to_json(self) -> str:
        """Return the parts that need no unpickling, for a store in which others can write."""
        return json.dumps([self.rank, self.world_size, self.time, self.summary, self.text])

    @classmethod
    def from_json(cls, words: str | bytes) -> Self:
        """Read what :meth:`to_json` wrote.

        Raises:
            ValueError: `words` is something else.
        """
        values = json.loads(words)
        if not isinstance(values, list) or [type(value) for value in values] != [int, int, float, str, str]:
            raise ValueError("not a failure report")
        return cls(*values)

    def as_exception(self) -> BaseException:
        """Rebuild the exception, or a WorkerError that describes it; the original traceback is its cause."""
        try:
            error = _rebuilt(self.pickled) if self.pickled is not None else None
        except Exception:  # an exception class whose __new__ does not accept its args
            error = None
        if not isinstance(error, BaseException):
            error = WorkerError(f"rank {self.rank} of {self.world_size} failed: {self.summary}")
        error.__cause__ = RankTraceback(self.rank, self.world_size, self.text)
        return error


def describe(error: BaseException, *, rank: int, world_size: int) -> Failure:
    """Create the report of a caught exception; very long texts keep their beginning and end."""
    message = "".join(traceback.format_exception_only(error)).strip()
    text = _shortened("".join(traceback.format_exception(error)), _LONGEST_TEXT)
    try:
        pickled = _pickled(error)
    except Exception:  # it holds something unpicklable
        pickled = b""
    is_fit = 0 < len(pickled) <= _LARGEST_PICKLE and len(message) <= _LONGEST_MESSAGE
    summary = _shortened(message, _LONGEST_SUMMARY)
    parts = (summary, text, pickled if is_fit else None)
    return Failure(rank, world_size, time.monotonic(), *parts, is_consequence=is_consequence(error))


def is_consequence(error: BaseException) -> bool:
    """Return whether `error` only reports that another process is gone."""
    if isinstance(error, DistError | PeerLostError):
        return True
    return type(error) is RuntimeError and "gloo" in str(error)


def _pickled(error: BaseException) -> bytes:
    kind = type(error)
    if isinstance(kind.__reduce__, FunctionType):  # it says itself how to pickle it
        return pickling.dumps(error)
    # Otherwise pickle would call the class with args, which its __init__ may not accept.
    _, args, *attributes = tuple[Any, ...](error.__reduce__())
    return pickling.dumps((kind, args, *attributes))


def _rebuilt(pickled: bytes) -> Any:
    value = pickling.loads(pickled)
    if not isinstance(value, tuple):
        return value
    kind, args, *attributes = value
    error = kind.__new__(kind, *args)
    built_in = next(each for each in kind.__mro__ if not isinstance(vars(each).get("__init__"), FunctionType | None))
    built_in.__init__(error, *args)  # sets the fields of classes such as SystemExit
    for each in attributes:
        error.__setstate__(each)
    return error


def record(error: BaseException, *, rank: int, world_size: int) -> None:
    """Report a failure to the process that started this one, if that was runnerkit; call it before any teardown."""
    handler = signal.getsignal(signal.SIGTERM)
    is_ended = isinstance(handler, ExitOnSignal) and handler.has_fired  # by that process, which knows the cause
    if FOLDER_VARIABLE in os.environ and not is_started_by_torchrun() and not is_ended:
        describe(error, rank=rank, world_size=world_size).write(Path(os.environ[FOLDER_VARIABLE]))


def _shortened(text: str, longest: int) -> str:
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def cause_of_end(folder: Path, exit_codes: dict[int, int | None]) -> BaseException:
    """Find what ended a job: a process that died without a report, else the first exception.

    When one process dies, the processes that wait for it raise "connection closed by peer"; that is a consequence.

    Args:
        folder: folder of the failure reports.
        exit_codes: by rank; None means still running, a negative code is a signal number.
    """
    failures = _reports(folder)
    if silent := _silent(folder, failures, exit_codes):
        rank, code = min(silent, key=lambda each: each[1])  # signals first
        return WorkerError(f"rank {rank} of {len(exit_codes)} {_how_it_ended(code)}")
    return min(failures, key=lambda failure: (failure.is_consequence, failure.time)).as_exception()


def is_cause_known(folder: Path, exit_codes: dict[int, int | None]) -> bool:
    """Return whether :func:`cause_of_end` would find more than that processes have lost another one."""
    failures = _reports(folder)
    return bool(_silent(folder, failures, exit_codes)) or not all(each.is_consequence for each in failures)


def _reports(folder: Path) -> list[Failure]:
    return [pickling.loads(path.read_bytes()) for path in folder.glob("failure.*")]


def _silent(folder: Path, failures: list[Failure], exit_codes: dict[int, int | None]) -> list[tuple[int, int]]:
    """Return the processes that ended without a report, and their exit codes."""
    spoke = {failure.rank for failure in failures}
    spoke |= {int(path.suffix[1:]) for path in folder.glob("done.*")}
    return [(rank, code) for rank, code in sorted(exit_codes.items()) if code is not None and rank not in spoke]


def _how_it_ended(code: int) -> str:
    if code == STOOD_STILL:
        return "hung and was ended by its HangCallback, which printed where"
    if code >= 0:
        return f"exited with code {code} and no exception (os._exit?)"
    name = signal.Signals(-code).name
    hint = "; the system kills processes like this when memory runs out" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"
