"""Tensors of all kinds on their way through Horovod, which has collectives for dense ones of some types only."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

_TYPES = {torch.float16, torch.float32, torch.float64, torch.int32, torch.int64}


def import_horovod() -> Any:
    """Return ``horovod.torch``.

    Raises:
        ImportError: it is not installed, or was built for another torch.
    """
    try:
        import horovod.torch
    except ImportError as error:
        raise ImportError(
            f"HorovodEngine needs Horovod: see docs/horovod.md for the install command ({error})"
        ) from error
    return horovod.torch


def broadcast_tensors(tensors: list[Tensor]) -> None:
    """Overwrite `tensors` by rank zero's; every rank must call."""
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


def reduce(tensor: Tensor, op: Literal["sum", "mean", "min", "max"]) -> Tensor:
    """Reduce over processes into a new tensor; every rank must call."""
    hvd = import_horovod()
    operation = {"sum": hvd.Sum, "mean": hvd.Sum, "min": hvd.Min, "max": hvd.Max}[op]
    reduced: Tensor = hvd.allreduce(_sendable(tensor.detach()), op=operation)
    return reduced / hvd.size() if op == "mean" else reduced.to(tensor.dtype)


def _sendable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or its values in a layout and type that hold them and that Horovod can send."""
    if tensor.dtype not in _TYPES and not tensor.is_complex():  # those Horovod refuses by itself, and clearly
        tensor = tensor.to(torch.float32 if tensor.is_floating_point() else torch.int64)
    return tensor.contiguous()


class SendableGradients:
    """Compressor for ``hvd.DistributedOptimizer`` around one of Horovod's own.

    It lets pass what Horovod refuses: bfloat16, and gradients that are not contiguous, as those of channels_last are.
    """

    def __init__(self, compressor: Any) -> None:
        self.compressor = compressor

    def compress(self, gradient: Tensor) -> tuple[Tensor, Any]:
        """Return what is sent, and what :meth:`decompress` needs."""
        sent, context = self.compressor.compress(_sendable(gradient))
        return sent, (gradient, context)

    def decompress(self, sent: Tensor, context: Any) -> Tensor:
        """Return the gradient, in the memory that it had."""
        gradient: Tensor
        if context is None:
            return sent  # a sparse gradient, which went another way
        gradient, inner = context
        averaged: Tensor = self.compressor.decompress(sent, inner)
        if averaged.data_ptr() == gradient.data_ptr():
            return gradient
        return gradient.detach().copy_(averaged)  # detached: Adasum sends an update, in the parameter's own memory
