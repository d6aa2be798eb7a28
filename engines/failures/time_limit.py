"""A time limit for calls that may block forever and cannot be interrupted, such as to an unreachable store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, fn: Callable[[], T]) -> T:
    """Return what `fn` returns or raise what it raises; after `seconds`, abandon it in its thread.

    Raises:
        TimeoutError: `fn` took too long.

    >>> within(10, lambda: 1 + 1)
    2
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(fn())
        except BaseException as error:  # result() raises it in the calling thread
            future.set_exception(error)

    threading.Thread(target=run, name="runnerkit-within", daemon=True).start()
    return future.result(seconds)
