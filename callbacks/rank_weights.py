"""Whether processes hold the same weights: a hash of each tensor, compared."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runnerkit.types import OneOrMany, as_dict

Hashes = dict[str, str]


def tensors_of(model: OneOrMany[nn.Module], *, with_buffers: bool) -> dict[str, Tensor]:
    """Name what all processes should hold alike: parameters, and buffers on request; not shards, which differ."""
    found: dict[str, Tensor] = {}
    for key, module in as_dict(model).items():
        named = [*module.named_parameters(), *(module.named_buffers() if with_buffers else ())]
        for name, tensor in named:
            name = name.removeprefix("_orig_mod.").removeprefix("module.")  # of compiled and of wrapped modules
            if not hasattr(tensor, "full_tensor"):  # a DTensor, of which each process holds a part
                found[f"{key}.{name}" if key else name] = tensor.detach()
    return found


def hashes_of(tensors: dict[str, Tensor]) -> Hashes:
    """Hash the bytes of each tensor: one copy to the host for each."""
    return {name: _hash(tensor) for name, tensor in tensors.items()}


def _hash(tensor: Tensor) -> str:
    # A copy even on the CPU: numpy would forbid FSDP2 to free the memory that it looks at.
    flat = tensor.to("cpu", copy=True).contiguous().reshape(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().data).hexdigest()


def differing(ranks: Sequence[Hashes]) -> dict[str, int]:
    """Find what is not alike: {tensor: the first rank whose differs from rank zero's}."""
    found = {}
    for name in {name: None for hashes in ranks for name in hashes}:
        strangers = [rank for rank, hashes in enumerate(ranks) if hashes.get(name) != ranks[0].get(name)]
        if strangers:
            found[name] = strangers[0]
    return found


def largest_difference(tensors: Sequence[Tensor | None]) -> float:
    """Compare one tensor of several processes with rank zero's; infinite where shapes differ, or one lacks it."""
    first = tensors[0]
    if first is None or any(each is None or each.shape != first.shape for each in tensors):
        return float("inf")
    return max(float((each.double() - first.double()).abs().max()) for each in tensors if each is not None)
