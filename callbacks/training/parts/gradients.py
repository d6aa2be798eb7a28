"""Gradient clipping and gradient norms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from runnerkit.steps.sparse_gradients import values_of, with_dense_gradients
from runnerkit.support.arguments import check_mappings
from runnerkit.support.torch_internals import is_dtensor, norm_of_each

ClipFn = Callable[..., Any] | str | None


def make_clip(clip_fn: ClipFn, params: dict[str, Any] | None) -> Callable[[list[Tensor]], Any] | None:
    """Bind `params` to a clipping function, given as such or by its name in ``torch.nn.utils``.

    Instead of a parameter with a sparse gradient, it gets the rows that this concerns, with a dense one.

    Raises:
        ValueError: the function does not exist, or `params` are given without a function.

    >>> make_clip("clip_grad_value_", {"clip_value": 1.0}) is not None
    True
    """
    if clip_fn is None:
        if params:
            raise ValueError(f"grad_clip_params={params} needs grad_clip_fn, such as 'clip_grad_norm_'")
        return None
    function = getattr(torch.nn.utils, clip_fn, None) if isinstance(clip_fn, str) else clip_fn
    if not callable(function):
        raise ValueError(f"grad_clip_fn={clip_fn!r} is not a function of torch.nn.utils; try 'clip_grad_norm_'")
    return lambda parameters: function(with_dense_gradients(parameters), **(params or {}))


def check_clip(owner: object, clip_fn: ClipFn, params: dict[str, Any] | None) -> None:
    """Raise the errors of :func:`make_clip` before the first step, prefixed with the class of `owner`."""
    check_mappings(owner, grad_clip_params=params)
    try:
        make_clip(clip_fn, params)
    except ValueError as error:
        raise ValueError(f"{type(owner).__name__}: {error}") from None


def clip_of_norm(
    owner: object, gradient_clip: float, params: dict[str, Any] | None
) -> tuple[ClipFn, dict[str, Any] | None]:
    """Return the function and its keyword arguments that clip to the norm `gradient_clip`; `params` must be None."""
    if params is not None:
        raise ValueError(
            f"{type(owner).__name__}: grad_clip_params are for grad_clip_fn; gradient_clip={gradient_clip} needs none"
        )
    return "clip_grad_norm_", {"max_norm": gradient_clip}


def gradient_norm(parameters: list[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients, a () tensor on their device; every rank must call this."""
    return _whole(torch.nn.utils.get_total_norm([values_of(each.grad) for each in parameters if each.grad is not None]))


def gradient_norms(parameters: list[Tensor]) -> list[Tensor]:
    """Return the Euclidean norm of each gradient, () tensors on their device; every rank must call this.

    Args:
        parameters: each has a gradient.
    """
    norms = norm_of_each([values_of(each.grad) for each in parameters if each.grad is not None])
    if not any(map(is_dtensor, norms)):
        return [*norms]
    # Stacked as in the norm of all gradients: one reduction, also of shards on several dimensions of a mesh.
    return [*_whole(torch.stack(norms)).unbind()]


def _whole(norms: Tensor) -> Tensor:
    return norms.full_tensor() if is_dtensor(norms) else norms
