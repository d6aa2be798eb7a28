"""Background work in a thread, one task at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread that runs tasks one after another; their exceptions are raised where they are waited for.

    >>> results = []
    >>> background = Background()
    >>> background.start(lambda: results.append(1))
    >>> background.wait()
    >>> results
    [1]
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._pending: Future[object] | None = None

    def start(self, work: Callable[[], object]) -> None:
        """Start `work` as soon as the previous task has ended.

        Raises:
            Exception: the previous task raised it; then `work` is not started.
        """
        self.wait()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runnerkit-save")
        self._pending = self._executor.submit(work)

    def wait(self) -> None:
        """Wait for the current task, if there is one.

        Raises:
            Exception: the task raised it.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, then end the thread."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def __getstate__(self) -> dict[str, None]:
        return {"_executor": None, "_pending": None}  # threads cannot be sent to other processes
