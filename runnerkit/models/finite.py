"""Check that weights are finite, with one copy to the host."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from runnerkit.support.torch_internals import local

_NARROW = 1  # bytes of an element of float8, which torch cannot compare with infinity


def non_finite_part(modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the first tensor of this process that training has spoiled; None if there is none.

    These are trainable parameters that hold NaN or infinity, and buffers that hold NaN: infinity in a buffer may be a
    mask. Of a sharded parameter, this process checks its shard.

    Args:
        modules: modules by the prefix of their names, which may be empty.

    >>> non_finite_part({"": nn.Linear(2, 1)}) is None
    True
    """
    names: list[str] = []
    extremes: dict[tuple[torch.device, torch.dtype], list[tuple[int, bool, Tensor]]] = {}

    def look_at(name: str, tensor: Tensor, *, may_be_infinite: bool) -> None:
        values = local(tensor.detach())
        if _can_check(tensor) and values.numel():
            # Both are NaN if any value is. A mask of all values would take a quarter of their memory.
            values = torch.view_as_real(values) if values.is_complex() else values
            known = extremes.setdefault((values.device, values.dtype), [])
            known += [(len(names), may_be_infinite, each) for each in values.aminmax()]
            names.append(name)

    for key, module in modules.items():
        prefix = f"{key}." if key else ""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                look_at(prefix + name, parameter, may_be_infinite=False)
        for name, buffer in module.named_buffers():
            look_at(prefix + name, buffer, may_be_infinite=True)
    spoiled = [len(names)]
    for known in extremes.values():  # one copy for each device and dtype
        places, may_be_infinite, tensors = zip(*known, strict=True)
        spoiled += [
            place
            for place, is_mask, value in zip(places, may_be_infinite, torch.stack(tensors).tolist(), strict=True)
            if math.isnan(value) or (math.isinf(value) and not is_mask)
        ]
    return [*names, None][min(spoiled)]


def _can_check(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.element_size() > _NARROW and not tensor.is_meta and not tensor.is_sparse
