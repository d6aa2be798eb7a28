"""Reports of what each rank's main thread waits for, added to the timeout error of a rank that waited for it."""

from __future__ import annotations

import sys
import threading
import time
import traceback
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in torch's __all__

from runnerkit.support.torch_internals import awaited_worker

_QUESTION = "runnerkit/what do you wait for"
_ANSWERS_S = 3.0  # a process looks for the question once a second
_POLL_S = 0.05
_NUM_FRAMES = 4
_IN_COLLECTIVES = ("torch/distributed/", "torch/autograd/graph.py")  # DDP reduces gradients in the backward pass


def is_timeout(error: BaseException) -> bool:
    """Return whether `error` reports that a collective of this process timed out."""
    return isinstance(error, RuntimeError) and "Timed out waiting" in str(error)


def ask_others(store: Store, *, rank: int, world_size: int) -> list[str]:
    """Ask the other ranks what they wait for; return a sentence for each that is not in a collective.

    Raises:
        DistError: rank zero, which holds the store, is gone.
    """
    store.set(_key(rank), "")  # this one waits in a collective
    store.set(_QUESTION, "")
    others = [_key(other) for other in range(world_size) if other != rank]
    deadline = time.monotonic() + _ANSWERS_S
    while not store.check(others) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    told = {other: store.get(_key(other)).decode() for other in range(world_size) if store.check([_key(other)])}
    stuck = {other: told.get(other, "it did not answer; it may have been stopped") for other in range(world_size)}
    return [f"rank {other} of {world_size} is stuck: {words}" for other, words in stuck.items() if words]


def answer(store: Store, *, rank: int) -> None:
    """Report what the main thread waits for if a rank asks; called in a thread, once a second."""
    if store.check([_QUESTION]) and not store.check([_key(rank)]):
        store.set(_key(rank), _describe_wait())


def _key(rank: int) -> str:
    return f"runnerkit/waits/{rank}"


def _describe_wait() -> str:
    """Describe what the main thread waits for; empty in a collective, since then another rank is the cause."""
    top: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    stack = "".join(traceback.format_stack(top, limit=_NUM_FRAMES))
    frame = top
    while frame is not None:
        if (worker := awaited_worker(frame.f_locals.get("self"))) is not None:
            return f"it is waiting for worker {worker[0]} (process {worker[1]}) of its data loader"
        frame = frame.f_back
    if top is not None and any(place in top.f_code.co_filename for place in _IN_COLLECTIVES):
        return ""
    return f"it is here:\n{stack}"
