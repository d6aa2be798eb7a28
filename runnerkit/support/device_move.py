"""The move of a batch to a device."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor


def move(value: Any, device: torch.device, *, path: str, channels_last: bool = False) -> Any:
    """Move `value` to `device`; see :meth:`IEngine.to_device`.

    Args:
        path: path of `value` in the batch, for error messages.
        channels_last: store 4-dimensional float tensors as (N, H, W, C) in memory; their shape does not change.
    """
    if isinstance(value, Tensor) and channels_last and value.ndim == 4 and value.is_floating_point():
        return value.to(device, non_blocking=True, memory_format=torch.channels_last)
    if isinstance(value, Tensor) or callable(getattr(value, "to", None)):
        # Without pinned memory non_blocking is ignored; with it, the copy overlaps with earlier work.
        return value.to(device, non_blocking=True)
    move_inner = partial(move, device=device, channels_last=channels_last)
    if isinstance(value, dict):
        return {key: move_inner(item, path=f"{path}[{key!r}]") for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        names: tuple[str, ...] = value._fields  # pyright: ignore[reportAttributeAccessIssue]  # a named tuple has it
        return type(value)(*(move_inner(item, path=f"{path}.{name}") for name, item in zip(names, value, strict=True)))
    if isinstance(value, list | tuple):
        return type(value)(move_inner(item, path=f"{path}[{index}]") for index, item in enumerate(value))
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        moved = {f.name: move_inner(getattr(value, f.name), path=f"{path}.{f.name}") for f in fields(value) if f.init}
        return replace(value, **moved)
    raise TypeError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be moved to {device}; "
        "convert it to a tensor in the data set or collate_fn, or give it a method to(device, non_blocking)"
    )
