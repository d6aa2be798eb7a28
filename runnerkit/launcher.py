"""Calls of a function in the processes of a job.

An engine *asks* for a launcher at each launch, because a process reads how it was started from its environment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from typing import Protocol, TypeVar

T = TypeVar("T")


class Member(Protocol):
    """A process of a job, such as an engine."""

    @abstractmethod
    def gather_rounds(self, values: Generator[T, None, None]) -> Generator[list[T], None, None]:
        """Gather the values of all processes, round by round."""

    @abstractmethod
    def cleanup(self) -> None:
        """Leave the job."""


class Launcher(ABC):
    """The interface of launchers."""

    @abstractmethod
    def launch(self, fn: Callable[[], T]) -> T:
        """Call `fn` in every process of the job; return the result of rank zero, or of this rank if the processes
        already run.

        Raises:
            Exception: the first exception of any process, with its traceback.
        """

    @abstractmethod
    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        """Iterate over `fn()` in every process of the job; yield the list of their first values, by rank, then that of
        their second values, and so on.

        Raises:
            Exception: like :meth:`launch`.
        """


class ThisProcess(Launcher):
    """The calling process, as a job of its own.

    Args:
        member: leaves the job after each call.
    """

    def __init__(self, member: Member) -> None:
        self._member = member

    def launch(self, fn: Callable[[], T]) -> T:
        try:
            return fn()
        finally:
            self._member.cleanup()

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        try:
            yield from self._member.gather_rounds(fn())
        finally:
            self._member.cleanup()
