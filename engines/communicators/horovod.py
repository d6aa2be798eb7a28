"""Communication through Horovod, also of tensors that its own operations reject."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from runnerkit.communicator import Communicator, ReduceOp
from runnerkit.engines.adapters.horovod_tensors import import_horovod, sendable

T = TypeVar("T")

_MOST_SUMS = 64  # under way at a time


class Horovod(Communicator):
    """Horovod's processes, which the engine has initialized."""

    def __init__(self) -> None:
        self._num_sums = 0

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        hvd = import_horovod()
        operation = {"sum": hvd.Sum, "mean": hvd.Sum, "min": hvd.Min, "max": hvd.Max}[op]
        reduced: Tensor = hvd.allreduce(sendable(tensor.detach()), op=operation)
        return reduced / hvd.size() if op == "mean" else reduced.to(tensor.dtype)

    def start_sum(self, value: Tensor) -> Callable[[], Tensor]:
        hvd = import_horovod()
        self._num_sums += 1  # names of sums under way must differ
        name = f"runnerkit.start_sum.{self._num_sums % _MOST_SUMS}"
        handle = hvd.allreduce_async(value, op=hvd.Sum, name=name)
        return lambda: cast(Tensor, hvd.synchronize(handle))

    def gather(self, value: T) -> list[T]:
        # Without a name Horovod uses the value's type as one, and ranks with different types never match.
        return cast(list[T], import_horovod().allgather_object(value, name="runnerkit.gather_object"))

    def broadcast(self, value: T) -> T:
        return cast(T, import_horovod().broadcast_object(value, root_rank=0, name="runnerkit.broadcast_object"))

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        hvd = import_horovod()
        handles: list[tuple[Tensor, Tensor, Any]] = []
        for tensor in tensors:
            if tensor.numel():
                sent = sendable(tensor.detach())
                handles.append((tensor, sent, hvd.broadcast_async_(sent, root_rank=0)))
        with torch.no_grad():
            for tensor, sent, handle in handles:
                hvd.synchronize(handle)
                tensor.copy_(sent)

    def barrier(self) -> None:
        import_horovod().barrier()
