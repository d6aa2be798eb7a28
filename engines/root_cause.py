"""What ended a job whose processes a launcher started: each of them finds out, and ends with that."""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public, though not in torch's __all__

from runnerkit.engines.failure import FAILED, Failure, PeerLostError, WorkerError, describe
from runnerkit.engines.stuck import ask_others, is_timeout
from runnerkit.engines.time_limit import within

_WORDS_S = 3.0  # for others to say what happened to them
_LINGER_S = 5.0  # for others to read it
_ANSWER_S = 5.0  # for the store
_POLL_S = 0.02
_NUM_CONSEQUENCES = "runnerkit/consequences"


def root_cause(
    error: BaseException, *, store: Store, rank: int, world_size: int, leave: Callable[[], None]
) -> BaseException:
    """Return what ended the job: `error`, or if that only says that another process left, what that process raised.

    Every rank that fails must call. It waits some seconds for the others, and for the store, which on a machine that is
    cut off answers nobody.

    Args:
        store: of the process group; rank zero's process may hold it.
        leave: closes the process group, upon which those that wait for this process fail as well.
    """
    with _without_sigchld():
        return _root_cause(error, store, rank, world_size, leave)


@contextmanager
def _without_sigchld() -> Iterator[None]:
    """Keep torch from raising in the main thread, in the middle of the body, that a worker of a loader has ended."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    try:
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except RuntimeError:  # torch's handler ran just now
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def _root_cause(
    error: BaseException, store: Store, rank: int, world_size: int, leave: Callable[[], None]
) -> BaseException:
    is_consequence = _is_consequence(error)
    if not is_consequence:
        _tell_torchrun(error)
    failure = describe(error, rank=rank, world_size=world_size)
    try:
        within(_ANSWER_S, lambda: _tell(failure, is_consequence, store))
        traceback.clear_frames(error.__traceback__)  # which hold the model, and that the open group
        leave()
        cause, num_spoke = error, world_size
        if is_consequence:
            cause, num_spoke = within(_WORDS_S + _ANSWER_S, lambda: _find(error, store, world_size))
        within(_LINGER_S + _ANSWER_S, lambda: _wait_for_readers(store, num_spoke))
    except TimeoutError:
        error.add_note(f"rank 0 of {world_size} does not answer: its machine, or this one, may be cut off")
        return error
    except DistError:
        if not is_consequence:
            return error
        return WorkerError(f"rank 0 of {world_size} left without a word: {_HOW}")
    return cause


def tell_early(error: BaseException, *, store: Store, rank: int, world_size: int) -> None:
    """Tell the others a cause before this process is torn down, or add to a time-out what they were doing meanwhile."""
    try:
        if is_timeout(error):
            for note in within(_WORDS_S + _ANSWER_S, lambda: ask_others(store, rank=rank, world_size=world_size)):
                error.add_note(note)
        elif not _is_consequence(error):
            _tell_torchrun(error)
            words = describe(error, rank=rank, world_size=world_size).to_json()
            within(_ANSWER_S, lambda: store.set(_key_of_cause(rank), words))
    except (DistError, TimeoutError):  # rank zero is gone; root_cause() says so
        return


def _tell(failure: Failure, is_consequence: bool, store: Store) -> None:
    # Whoever reaches the store can write there: text, which nothing unpickles.
    if is_consequence:
        store.set(_key_of_consequence(failure.rank), failure.to_json())
        store.add(_NUM_CONSEQUENCES, 1)
    else:
        store.set(_key_of_cause(failure.rank), failure.to_json())
        store.set(FAILED, str(failure.rank))


def _wait_for_readers(store: Store, count: int) -> None:
    store.add("runnerkit/read", 1)
    _wait(lambda: store.add("runnerkit/read", 0) >= count, _LINGER_S)


_HOW = "killed, by the system if memory ran out, or gone by os._exit; its launcher knows the exit code"


def _find(error: BaseException, store: Store, world_size: int) -> tuple[BaseException, int]:
    """Return the cause that a rank has told, and how many have told something."""
    causes: list[Failure] = []

    def is_known() -> bool:
        with suppress(ValueError):  # a stranger wrote there
            if store.check([FAILED]):
                causes.extend(_told(store, _key_of_cause(int(store.get(FAILED)))))
        return bool(causes) or store.add(_NUM_CONSEQUENCES, 0) >= world_size

    _wait(is_known, _WORDS_S)
    if causes:
        return causes[0].as_exception(), world_size
    spoke = [rank for rank in range(world_size) if _told(store, _key_of_consequence(rank))]
    silent = sorted(set(range(world_size)) - set(spoke))
    for rank in silent:
        if early := _told(store, _key_of_cause(rank)):  # it got no further than that
            return early[0].as_exception(), len(spoke)
    if silent and not is_timeout(error):
        who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {silent}"
        lost = WorkerError(f"{who} of {world_size} left without a word: {_HOW}")
        for note in getattr(error, "__notes__", ()):
            lost.add_note(f"a rank that waited for it was {note}")
        return lost, len(spoke)
    return error, len(spoke)


def _told(store: Store, key: str) -> list[Failure]:
    """Read the failure that a rank may have written, or a stranger something else."""
    with suppress(ValueError):
        return [Failure.from_json(store.get(key))] if store.check([key]) else []
    return []


def _key_of_cause(rank: int) -> str:
    return f"runnerkit/cause/{rank}"


def _key_of_consequence(rank: int) -> str:
    return f"runnerkit/consequence/{rank}"


def _is_consequence(error: BaseException) -> bool:
    """Whether it says no more than that another process has left."""
    if isinstance(error, DistError | PeerLostError):
        return True
    return type(error) is RuntimeError and "gloo" in str(error)


def _tell_torchrun(error: BaseException) -> None:
    """Leave the traceback in the file from which torchrun makes its report, if it wants one."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def _wait(is_over: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_over() and time.monotonic() < deadline:
        time.sleep(_POLL_S)
