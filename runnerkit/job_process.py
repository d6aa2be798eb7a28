"""This process and the others of its job: rank, launching, collectives and failures."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import closing
from itertools import islice
from typing import Any, TypeVar, cast

from torch import Tensor

from runnerkit.communicator import Communicator, OneProcess, ReduceOp
from runnerkit.support.members import overrides

T = TypeVar("T")


class JobProcess:
    """The part of an engine that knows no model: a process of a job.

    Attributes:
        communicator: what the collectives go through; a job of one process by default.
        process_index: rank of this process in the job, 0 for the main process; also `rank`.
        local_process_index: rank of this process on its machine.
        num_processes: number of processes of the job; also `world_size`.
    """

    communicator: Communicator = OneProcess()
    process_index: int = 0
    local_process_index: int = 0
    num_processes: int = 1

    @property
    def rank(self) -> int:
        """Same as `process_index`."""
        return self.process_index

    @property
    def is_master_process(self) -> bool:
        """Same as `is_main_process`."""
        return self.is_main_process

    @property
    def world_size(self) -> int:
        """Same as `num_processes`."""
        return self.num_processes

    @property
    def is_main_process(self) -> bool:
        """True for rank 0, which writes files."""
        return self.process_index == 0

    def check(self) -> None:
        """Check that this machine has the packages and GPUs that the engine needs, without starting processes.

        Raises:
            ImportError, RuntimeError: a requirement is missing; the message tells how to meet it.
        """

    def launcher(self) -> Launcher:
        """Return the launcher of the job.

        Called at each launch, after :meth:`check`, because a process reads how it was started from its environment. An
        engine may have a launcher as an attribute of this name instead.
        """
        return ThisProcess(self)

    def launch(self, fn: Callable[[], T]) -> T:
        """Call `fn` in every process of the job; return rank zero's result, or this rank's if they already run.

        Raises:
            Exception: the first exception of any process, with its traceback.
        """
        self.check()
        return _launcher_of(self).launch(fn)

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        """Iterate over `fn()` in every process of the job; yield the list of their first values, by rank, then that of
        their second values, and so on. Processes that have ended are left out. Nothing starts before the first request.

        Every process that called this gets the values: only the caller if the engine starts the others, but all under
        a launcher, where all must take the same number.

        Raises:
            Exception: like :meth:`launch`.
        """
        self.check()
        yield from _launcher_of(self).stream(fn)

    def cleanup(self) -> None:
        """Leave the process group; safe to call twice."""

    # Collectives.

    def check_communicator(self) -> None:
        """Raise if processes of one job would train each for itself.

        Raises:
            TypeError: there are several, and a communicator of one.
        """
        if self.num_processes > 1 and isinstance(self.communicator, OneProcess) and _is_inherited(self):
            raise TypeError(
                f"{type(self).__name__} has {self.num_processes} processes and no communicator: set self.communicator, "
                "for example to a ProcessGroup, or override reduce, start_sum, gather_object, broadcast_object and "
                "barrier"
            )

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        """Reduce over processes into a new tensor; every rank must call."""
        return self.communicator.reduce(tensor, op)

    def start_sum(self, value: Tensor) -> Callable[[], Tensor]:
        """Start to sum `value`, a small tensor on the device or in host memory, over processes; every rank must call.

        Returns:
            A function that waits for the sum; for one on a GPU, without a host synchronization.
        """
        return self.communicator.start_sum(value)

    def gather_object(self, value: T) -> list[T]:
        """Collect a picklable value of every process, by rank; every rank must call."""
        return self.communicator.gather(value)

    def broadcast_object(self, value: T) -> T:
        """Return rank zero's `value`, picklable; every rank must call."""
        return self.communicator.broadcast(value)

    def barrier(self) -> None:
        """Wait for every process; every rank must call."""
        self.communicator.barrier()

    def gather_rounds(self, values: Generator[T, None, None]) -> Generator[list[T], None, None]:
        """Yield the list of all ranks' first values, by rank, then of their second values, until all have ended.

        Ranks whose `values` have ended are left out. Every rank must take all rounds.
        """
        with closing(values):
            while gathered := [value for theirs in self.gather_object(list(islice(values, 1))) for value in theirs]:
                yield gathered

    # Failures and loaders.

    def record_failure(self, error: BaseException) -> None:
        """Report `error` to the other processes, or to this one's parent, before anything else can fail.

        Called before ``on_exception``. If `error` is about another process that did not answer, this may take seconds
        and adds the position of that process to it.
        """

    def enter_training_loader(self, position: Callable[[], int]) -> None:
        """Start training on a loader; every rank must call.

        Args:
            position: returns the number of the current batch; called in a thread.
        """

    def leave_training_loader(self, num_batches: int, *, key: str) -> None:
        """Wait until every process has finished training on loader `key`; every rank must call.

        Raises:
            ValueError: the processes differ in the number of batches.
        """

    def settle(self) -> None:
        """Pause the engine's threads; called before a loader forks its workers."""
        self.communicator.settle()


def _is_inherited(process: JobProcess) -> bool:
    names = ("reduce", "start_sum", "gather_object", "broadcast_object", "barrier")
    return not all(overrides(process, JobProcess, name) for name in names)


def _launcher_of(process: JobProcess) -> Launcher:
    given: Any = process.launcher
    launcher = given() if callable(given) else given
    if not all(hasattr(launcher, name) for name in ("launch", "stream")):
        raise TypeError(
            f"{type(process).__name__}.launcher must be a method that returns a Launcher, or a Launcher, got "
            f"{launcher!r}: give an attribute of yours another name"
        )
    return cast(Launcher, launcher)


class Launcher(ABC):
    """The interface of launchers, whose methods are those of :class:`JobProcess`."""

    @abstractmethod
    def launch(self, fn: Callable[[], T]) -> T: ...

    @abstractmethod
    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]: ...


class ThisProcess(Launcher):
    """The calling process, as a job of its own.

    Args:
        process: leaves the job after each call.
    """

    def __init__(self, process: JobProcess) -> None:
        self._process = process

    def launch(self, fn: Callable[[], T]) -> T:
        try:
            return fn()
        finally:
            self._process.cleanup()

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        try:
            yield from self._process.gather_rounds(fn())
        finally:
            self._process.cleanup()
