"""Work that a step need not wait for: in a thread, one piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Runs pieces of work one after another; what one raises is raised where it is waited for.

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
        """Begin `work` as soon as the piece before has ended.

        Raises:
            Exception: what the piece before raised; then `work` is not begun.
        """
        self.wait()
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="runnerkit-save")
        self._pending = self._executor.submit(work)

    def wait(self) -> None:
        """Wait for the piece under way, if there is one.

        Raises:
            Exception: what it raised.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and let the thread go."""
        try:
            self.wait()
        finally:
            if self._executor is not None:
                self._executor.shutdown()
                self._executor = None

    def __getstate__(self) -> dict[str, None]:
        return {"_executor": None, "_pending": None}  # threads do not travel to other processes
