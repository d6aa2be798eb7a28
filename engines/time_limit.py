"""A limit to what may wait for ever and cannot be interrupted, such as a store on a machine that is cut off."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, fn: Callable[[], T]) -> T:
    """Return what `fn` returns or raise what it raises; when its time is up, leave it behind in its thread.

    Raises:
        TimeoutError: the time is up.

    >>> within(10, lambda: 1 + 1)
    2
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:  # it is raised where it is waited for
            future.set_exception(error)

    threading.Thread(target=run, name="runnerkit-within", daemon=True).start()
    return future.result(seconds)
