"""Communication through Horovod, also of tensors that its own operations reject."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from runnerkit.communicator import Communicator, ReduceOp

T = TypeVar("T")

_MOST_SUMS = 64  # under way at a time
_TYPES = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}


def import_horovod() -> Any:
    """Return ``horovod.torch``.

    Raises:
        ImportError: Horovod is not installed, or was built for another version of torch.
    """
    try:
        import horovod.torch
    except ImportError as error:
        raise ImportError(
            f"HorovodEngine needs Horovod: see docs/horovod.md for the install command ({error})"
        ) from error
    return horovod.torch


class Horovod(Communicator):
    """Horovod's processes, which the engine has initialized."""

    def __init__(self) -> None:
        self._num_sums = 0

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        hvd = import_horovod()
        operation = {"sum": hvd.Sum, "mean": hvd.Sum, "min": hvd.Min, "max": hvd.Max}[op]
        reduced: Tensor = hvd.allreduce(_sendable(tensor.detach()), op=operation)
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
                sent = _sendable(tensor.detach())
                handles.append((tensor, sent, hvd.broadcast_async_(sent, root_rank=0)))
        with torch.no_grad():
            for tensor, sent, handle in handles:
                hvd.synchronize(handle)
                tensor.copy_(sent)

    def barrier(self) -> None:
        import_horovod().barrier()


def _sendable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or its values in a layout and dtype that Horovod can send."""
    if tensor.dtype not in _TYPES and not tensor.is_complex():  # Horovod rejects complex ones with a clear error
        tensor = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
    return tensor.contiguous()


class SendableGradients:
    """Compressor for ``hvd.DistributedOptimizer`` that wraps one of Horovod's own.

    It also supports what Horovod rejects: bfloat16, and non-contiguous gradients, such as those of channels_last.
    """

    def __init__(self, compressor: Any) -> None:
        self.compressor = compressor

    def compress(self, gradient: Tensor) -> tuple[Tensor, Any]:
        """Return the tensor to send and the context for :meth:`decompress`."""
        sent, context = self.compressor.compress(_sendable(gradient))
        return sent, (gradient, context)

    def decompress(self, sent: Tensor, context: Any) -> Tensor:
        """Return the gradient in its original memory."""
        gradient: Tensor
        if context is None:
            return sent  # a sparse gradient, which is not compressed
        gradient, inner = context
        averaged: Tensor = self.compressor.decompress(sent, inner)
        if averaged.data_ptr() == gradient.data_ptr():
            return gradient
        return gradient.detach().copy_(averaged)  # detached: Adasum sends an update, in the parameter's own memory
