"""Check that weights are finite, with one copy to the host."""

from __future__ import annotations

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
    found: dict[str, Tensor] = {}
    for key, module in modules.items():
        prefix = f"{key}." if key else ""
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and _can_check(parameter):
                found[prefix + name] = _extremes(parameter).isfinite().all()
        for name, buffer in module.named_buffers():
            if _can_check(buffer):
                found[prefix + name] = ~_extremes(buffer).isnan().any()
    # One copy for each device: a model may be on several.
    by_device: dict[torch.device, list[str]] = {}
    for name, flag in found.items():
        by_device.setdefault(flag.device, []).append(name)
    spoiled = set()
    for names in by_device.values():
        flags = torch.stack([found[name] for name in names]).tolist()
        spoiled |= {name for name, is_good in zip(names, flags, strict=True) if not is_good}
    return next((name for name in found if name in spoiled), None)


def _extremes(tensor: Tensor) -> Tensor:
    """Return the least and the greatest value, both NaN if any value is: a mask of all would take much more memory."""
    values = local(tensor.detach())
    values = torch.view_as_real(values) if values.is_complex() else values
    return torch.stack(values.aminmax()) if values.numel() else values


def _can_check(tensor: Tensor) -> bool:
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return is_number and tensor.element_size() > _NARROW and not tensor.is_meta and not tensor.is_sparse
