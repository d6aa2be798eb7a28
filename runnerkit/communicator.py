"""Exchange of tensors and values between the processes of a job."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, TypeVar

from torch import Tensor

T = TypeVar("T")
ReduceOp: TypeAlias = Literal["sum", "mean", "min", "max"]

_SETTLE_S = 0.005


class Communicator(ABC):
    """The interface of communicators. Every rank must call each operation, in the same order.

    An engine documents them: ``reduce``, ``start_sum``, ``gather_object``, ``broadcast_object`` and ``barrier``.
    """

    @abstractmethod
    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor: ...

    @abstractmethod
    def start_sum(self, value: Tensor) -> Callable[[], Tensor]: ...

    @abstractmethod
    def gather(self, value: T) -> list[T]: ...

    @abstractmethod
    def broadcast(self, value: T) -> T: ...

    @abstractmethod
    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite `tensors` with rank zero's."""

    @abstractmethod
    def barrier(self) -> None: ...

    def settle(self) -> None:
        """Pause the communicator's threads; called before this process forks.

        A thread of gloo or Horovod briefly holds an interpreter lock while it frees the last collective's tensors. A
        worker forked at that moment inherits the lock but not the thread, and hangs (CPython 3.11, 1 fork in
        thousands).
        """
        time.sleep(_SETTLE_S)


class OneProcess(Communicator):
    """The communicator of a job of one process.

    >>> OneProcess().gather("value")
    ['value']
    """

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        return tensor.clone()

    def start_sum(self, value: Tensor) -> Callable[[], Tensor]:
        return lambda: value

    def gather(self, value: T) -> list[T]:
        return [value]

    def broadcast(self, value: T) -> T:
        return value

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        pass

    def barrier(self) -> None:
        pass

    def settle(self) -> None:
        pass
