"""Comparison of weights between ranks, by a hash of each tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runnerkit.support.torch_internals import COMPILED, is_dtensor
from runnerkit.types import OneOrMany, as_dict

Hashes = dict[str, str]


def tensors_of(model: OneOrMany[nn.Module], *, with_buffers: bool) -> dict[str, Tensor]:
    """Return the tensors that must be equal on all ranks, by name: parameters and optionally buffers, but no shards."""
    found: dict[str, Tensor] = {}
    for key, module in as_dict(model).items():
        named = [*module.named_parameters(), *(module.named_buffers() if with_buffers else ())]
        for name, tensor in named:
            name = name.removeprefix(f"{COMPILED}.").removeprefix("module.")  # added by torch.compile and DDP
            if not is_dtensor(tensor):
                found[f"{key}.{name}" if key else name] = tensor.detach()
    return found


def hashes_of(tensors: dict[str, Tensor]) -> Hashes:
    """Hash the bytes of each tensor: one copy to the host for each."""
    return {name: _hash(tensor) for name, tensor in tensors.items()}


def _hash(tensor: Tensor) -> str:
    # Copy even on the CPU: a numpy view would prevent FSDP2 from freeing the memory.
    flat = tensor.to("cpu", copy=True).contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def differing(ranks: Sequence[Hashes]) -> dict[str, int]:
    """Return {tensor name: the first rank that differs from rank zero}."""
    found = {}
    for name in {name: None for hashes in ranks for name in hashes}:
        strangers = [rank for rank, hashes in enumerate(ranks) if hashes.get(name) != ranks[0].get(name)]
        if strangers:
            found[name] = strangers[0]
    return found


def largest_difference(tensors: Sequence[Tensor | None]) -> float:
    """Return the largest difference from rank zero's tensor; infinite if shapes differ or a rank lacks the tensor."""
    first = tensors[0]
    if first is None or any(each is None or each.shape != first.shape for each in tensors):
        return float("inf")
    return max(float((each.double() - first.double()).abs().max()) for each in tensors if each is not None)
