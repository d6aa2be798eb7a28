"""Root cause of a failed job that a launcher started: every process finds it through the store and raises it."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public, though not in torch's __all__

from runnerkit.engines.failures.failure import FAILED, Failure, WorkerError, describe, is_consequence
from runnerkit.engines.failures.stuck import ask_others, is_timeout
from runnerkit.engines.failures.time_limit import within
from runnerkit.support.platform import signals

_REPORT_S = 3.0  # time for other ranks to report what happened to them
_READ_S = 5.0  # time for other ranks to read the reports
_ANSWER_S = 5.0  # time for the store to answer
_AFTER_CAUSE_S = 1.0
_POLL_S = 0.02
_NUM_CONSEQUENCES = "runnerkit/consequences"


def root_cause(
    error: BaseException, *, store: Store, rank: int, world_size: int, close_group: Callable[[], None]
) -> BaseException:
    """Return what ended the job: `error`, or if that only reports the loss of a process, what that process raised.

    Every rank that fails must call this. It waits a few seconds for the others and for the store, which does not answer
    if a machine is cut off.

    Args:
        store: store of the process group; rank zero's process may hold it.
        close_group: closes the process group, so that ranks that wait for this process fail as well.
    """
    with _without_sigchld():
        return _root_cause(error, store, rank, world_size, close_group)


@contextmanager
def _without_sigchld() -> Iterator[None]:
    """Keep torch from raising in the main thread, in the middle of the body, when a loader's worker has ended."""
    if threading.current_thread() is not threading.main_thread() or not signals("SIGCHLD"):
        yield
        return
    try:
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except RuntimeError:  # torch's handler ran at this moment
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _root_cause(
    error: BaseException, store: Store, rank: int, world_size: int, close_group: Callable[[], None]
) -> BaseException:
    failure = describe(error, rank=rank, world_size=world_size)
    if not failure.is_consequence:
        _tell_torchrun(error)
    try:
        within(_ANSWER_S, lambda: _report(failure, store))
        traceback.clear_frames(error.__traceback__)  # frames hold the model, which holds the open group
        close_group()
        cause, num_reported = error, world_size
        if failure.is_consequence:
            cause, num_reported = within(_REPORT_S + _ANSWER_S, lambda: _find(error, store, world_size))
        within(_READ_S + _ANSWER_S, lambda: _wait_for_readers(store, num_reported))
    except TimeoutError:
        error.add_note(f"rank 0 of {world_size} does not answer: its machine or this one may be cut off")
        return error
    except DistError:
        if not failure.is_consequence:
            return error
        return WorkerError(f"rank 0 of {world_size} ended without an error report: {_WAS_KILLED}")
    if failure.is_consequence and "TORCHELASTIC_ERROR_FILE" in os.environ:
        time.sleep(_AFTER_CAUSE_S)  # torchrun's report names the rank that ended first, to the second
    return cause


def report_early(error: BaseException, *, store: Store, rank: int, world_size: int) -> None:
    """Report a cause to the other ranks before teardown, or add notes to a timeout on what they are doing."""
    try:
        if is_timeout(error):
            for note in within(_REPORT_S + _ANSWER_S, lambda: ask_others(store, rank=rank, world_size=world_size)):
                error.add_note(note)
        elif not is_consequence(error):
            _tell_torchrun(error)
            words = describe(error, rank=rank, world_size=world_size).to_json()
            within(_ANSWER_S, lambda: store.set(_key_of_cause(rank), words))
    except (DistError, TimeoutError):  # rank zero is gone; root_cause() reports that
        return


def _report(failure: Failure, store: Store) -> None:
    # Anyone who can reach the store can write to it, so only text is sent and nothing is unpickled.
    if failure.is_consequence:
        store.set(_key_of_consequence(failure.rank), failure.to_json())
        store.add(_NUM_CONSEQUENCES, 1)
    else:
        store.set(_key_of_cause(failure.rank), failure.to_json())
        store.set(FAILED, str(failure.rank))


def _wait_for_readers(store: Store, count: int) -> None:
    store.add("runnerkit/read", 1)
    _wait(lambda: store.add("runnerkit/read", 0) >= count, _READ_S)


_WAS_KILLED = "it was killed, by the system if memory ran out, or called os._exit; its launcher knows the exit code"


def _find(error: BaseException, store: Store, world_size: int) -> tuple[BaseException, int]:
    """Return the cause that a rank has reported, and the number of ranks that have reported anything."""
    causes: list[Failure] = []

    def is_known() -> bool:
        with suppress(ValueError):  # written by another program
            if store.check([FAILED]):
                causes.extend(_reported_failures(store, _key_of_cause(int(store.get(FAILED)))))
        return bool(causes) or store.add(_NUM_CONSEQUENCES, 0) >= world_size

    _wait(is_known, _REPORT_S)
    if causes:
        return causes[0].as_exception(), world_size
    reported = [rank for rank in range(world_size) if _reported_failures(store, _key_of_consequence(rank))]
    silent = sorted(set(range(world_size)) - set(reported))
    for rank in silent:
        if early := _reported_failures(store, _key_of_cause(rank)):  # it was killed before it reported more
            return early[0].as_exception(), len(reported)
    if silent and not is_timeout(error):
        who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {silent}"
        lost = WorkerError(f"{who} of {world_size} ended without an error report: {_WAS_KILLED}")
        for note in getattr(error, "__notes__", ()):
            lost.add_note(f"a rank that waited for it was {note}")
        return lost, len(reported)
    return error, len(reported)


def _reported_failures(store: Store, key: str) -> list[Failure]:
    """Return the failure report at `key`, if there is a valid one."""
    with suppress(ValueError):
        return [Failure.from_json(store.get(key))] if store.check([key]) else []
    return []


def _key_of_cause(rank: int) -> str:
    return f"runnerkit/cause/{rank}"


def _key_of_consequence(rank: int) -> str:
    return f"runnerkit/consequence/{rank}"


def _tell_torchrun(error: BaseException) -> None:
    """Write the traceback to the file from which torchrun makes its report, if it asked for one."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _wait(is_over: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
