"""How many functions a training step calls: a cost that no other load on the machine can blur."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def num_calls(work: Callable[[], object]) -> int:
    """Count the calls of Python and of builtin functions in this thread while `work` runs."""
    count = 0

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    gc.disable()  # a collection calls finalizers whenever it happens to come
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


def calls_per_step(train: Callable[[int], object], *, few: int = 50, many: int = 150) -> float:
    """Count the calls of one step of `train(num_steps)`; what comes once, before and after the steps, cancels.

    Args:
        train: called four times; the first two, which are not counted, import and fill caches.
        few, many: numbers of steps whose counts are subtracted. Something that happens every n-th step is right on
            average if n divides the difference.

    >>> calls_per_step(lambda num_steps: [abs(-1) for _ in range(num_steps)])
    1.0
    """
    for _ in range(2):  # what the first imports empties caches of isinstance
        train(few)
    return (num_calls(lambda: train(many)) - num_calls(lambda: train(few))) / (many - few)
