"""What ended a job whose processes a launcher started: each of them finds out, and ends with that."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable

from torch.distributed import DistError, Store  # type: ignore[attr-defined]  # public, though not in torch's __all__

from runnerkit import pickling
from runnerkit.engines.failure import FAILED, Failure, PeerLostError, WorkerError, describe
from runnerkit.engines.time_limit import within

_WORDS_S = 3.0  # for others to say what happened to them
_LINGER_S = 5.0  # for others to read it
_ANSWER_S = 5.0  # for the store
_POLL_S = 0.02


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


def _tell(failure: Failure, is_consequence: bool, store: Store) -> None:
    number = store.add("runnerkit/failures", 1)
    store.set(f"runnerkit/failure/{number}", pickling.dumps((failure, is_consequence)))  # type: ignore[arg-type]  # bytes too
    if not is_consequence:
        store.set(FAILED, "")


def _wait_for_readers(store: Store, count: int) -> None:
    store.add("runnerkit/read", 1)
    _wait(lambda: store.add("runnerkit/read", 0) >= count, _LINGER_S)


_HOW = "killed, by the system if memory ran out, or gone by os._exit; its launcher knows the exit code"


def _find(error: BaseException, store: Store, world_size: int) -> tuple[BaseException, int]:
    """Return the first cause that a rank has told, and how many have told something."""
    told: dict[int, tuple[Failure, bool]] = {}

    def is_known() -> bool:
        for number in range(1, store.add("runnerkit/failures", 0) + 1):
            key = f"runnerkit/failure/{number}"
            if number not in told and store.check([key]):
                told[number] = pickling.loads(store.get(key))
        return len(told) == world_size or any(not is_consequence for _, is_consequence in told.values())

    _wait(is_known, _WORDS_S)
    causes = [failure for _, (failure, is_consequence) in sorted(told.items()) if not is_consequence]
    if causes:
        return causes[0].as_exception(), world_size
    silent = sorted(set(range(world_size)) - {failure.rank for failure, _ in told.values()})
    if silent:
        who = f"rank {silent[0]}" if len(silent) == 1 else f"ranks {silent}"
        lost = WorkerError(f"{who} of {world_size} left without a word: {_HOW}")
        for note in getattr(error, "__notes__", ()):
            lost.add_note(f"a rank that waited for it was {note}")
        return lost, len(told)
    return error, world_size


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
