"""Horovod, and tensors in the layouts and dtypes that it can send."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


def sendable(tensor: Tensor) -> Tensor:
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
        sent, context = self.compressor.compress(sendable(gradient))
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
