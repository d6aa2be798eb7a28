"""Function calls per training step: a measure of cost that is independent of the machine's load."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_calls(work: Callable[[], object]) -> int:
    """Count the calls of Python and builtin functions in this thread while `work` runs."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    gc.disable()  # a collection calls finalizers at unpredictable times
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def calls_per_step(train: Callable[[int], object], *, few: int = 50, many: int = 150) -> float:
    """Count the calls in one step of `train(num_steps)`; one-time calls before and after the steps cancel out.

    Args:
        train: called four times; the first two calls, which are not counted, do the imports and fill caches.
        few, many: numbers of steps whose counts are subtracted. Calls in every n-th step are averaged correctly if n
            divides the difference.

    >>> calls_per_step(lambda num_steps: [abs(-1) for _ in range(num_steps)])
    1.0
    """
    for _ in range(2):  # imports in the first call clear the caches of isinstance
        train(few)
    return (num_calls(lambda: train(many)) - num_calls(lambda: train(few))) / (many - few)
