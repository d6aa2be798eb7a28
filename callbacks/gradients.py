"""Gradient clipping, and the norm of gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runnerkit.arguments import check_mappings

ClipFn = Callable[..., Any] | str | None


def make_clip(clip_fn: ClipFn, params: dict[str, Any] | None) -> Callable[[list[Tensor]], Any] | None:
    """Bind `params` to a clipping function, or to that of ``torch.nn.utils`` by name.

    Raises:
        ValueError: there is no function of that name, or parameters without a function.

    >>> make_clip("clip_grad_value_", {"clip_value": 1.0}) is not None
    True
    """
    if clip_fn is None:
        if params:
            raise ValueError(f"grad_clip_params={params} without grad_clip_fn; pass one, such as 'clip_grad_norm_'")
        return None
    function = getattr(torch.nn.utils, clip_fn, None) if isinstance(clip_fn, str) else clip_fn
    if not callable(function):
        raise ValueError(f"grad_clip_fn={clip_fn!r} is no function of torch.nn.utils; try 'clip_grad_norm_'")
    return lambda parameters: function(parameters, **(params or {}))


def check_clip(owner: object, clip_fn: ClipFn, params: dict[str, Any] | None) -> None:
    """Refuse now what :func:`make_clip` would at the first step, by the class of `owner`."""
    check_mappings(owner, grad_clip_params=params)
    try:
        make_clip(clip_fn, params)
    except ValueError as error:
        raise ValueError(f"{type(owner).__name__}: {error}") from None


def gradient_norm(parameters: list[Tensor]) -> Tensor:
    """Euclidean norm of all gradients together, a () tensor on their device; every rank must call."""
    return whole(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))


def whole(norm: Tensor) -> Tensor:
    """Return a norm as a plain tensor: of a DTensor ranks hold parts, and every rank must call."""
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm  # pyright: ignore[reportAttributeAccessIssue]
