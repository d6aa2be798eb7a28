"""Predicted and true classes of a classifier, as validated class indices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_FREE_TO_READ = frozenset({"cpu"})
_LEAVE_OUT = "remove rows to ignore (ignore_index) from what the metric gets, in handle_batch"


def class_indices(
    outputs: Tensor, targets: Tensor, *, num_classes: int | None, threshold: float | None = None
) -> tuple[Tensor, Tensor, int]:
    """Return predicted and true class of every sample, (M,) int64 each, and the number of classes.

    Invalid indices become C, which is counted separately and refused by :func:`check_all_classes` when a value is read:
    an earlier check would cost a host sync, and scattering an invalid index on a GPU would end the process.

    Args:
        outputs: logits (N, C, ...) of C > 1 classes, or one output per target with the shape of `targets` or (N, 1,
            ...), see :func:`predicted_classes`; class indices need `num_classes`.
        targets: class indices (N, ...).
        num_classes: C; None takes it from the logits.
        threshold: a score above it is class 1.
    Raises:
        ValueError: shapes do not match. On the CPU, where a check is free, also if an index is outside [0, C).
    """
    if outputs.ndim == targets.ndim + 1 and outputs.shape[1] != 1:
        check_logits(outputs, threshold)
        num_classes, outputs = _checked_classes(outputs.shape[1], num_classes), outputs.argmax(dim=1)
    elif outputs.ndim == targets.ndim + 1:
        outputs = outputs.squeeze(1)
    if outputs.shape != targets.shape:
        raise ValueError(
            f"expected logits (N, C, ...) and targets (N, ...), got {tuple(outputs.shape)} and {tuple(targets.shape)}"
        )
    if outputs.is_floating_point() or threshold is not None:
        num_classes = _checked_classes(2, num_classes)
    if num_classes is None:
        raise ValueError("outputs are class indices, not logits: pass num_classes=")
    outputs, targets = predicted_classes(outputs, threshold).reshape(-1), targets.reshape(-1)
    if targets.device.type in _FREE_TO_READ:
        for name, indices in (("targets", targets), ("outputs", outputs)):
            check_classes(indices, num_classes=num_classes, name=name)
    outputs, targets = (_with_others_last(each, num_classes=num_classes) for each in (outputs, targets))
    return outputs, targets, num_classes


def predicted_classes(outputs: Tensor, threshold: float | None) -> Tensor:
    """Return the classes of one output per target: float scores above the threshold are class 1, others are classes.

    Args:
        outputs: float scores, or class indices of another dtype.
        threshold: required for scores, because logits and probabilities cannot be told apart.
    Raises:
        ValueError: there is no threshold for scores.
    """
    if not outputs.is_floating_point():
        return outputs
    if threshold is None:
        raise ValueError(
            f"outputs {tuple(outputs.shape)} of {outputs.dtype} are one score per target: pass threshold=0 if they are "
            "logits, threshold=0.5 if they are probabilities; class indices need an integer dtype"
        )
    return is_above(outputs, threshold)


def is_above(scores: Tensor, threshold: float | Tensor) -> Tensor:
    """Compare with a threshold, which half precision would round to three digits."""
    return (scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores) > threshold


def check_logits(logits: Tensor, threshold: float | None) -> None:
    """Raise unless the largest of the scores of several classes, (N, C, ...), is the predicted class.

    Raises:
        ValueError: they are decisions, or there is a threshold.
    """
    if logits.dtype is torch.bool:
        raise ValueError(f"outputs {tuple(logits.shape)} of torch.bool are decisions: pass logits, or class indices")
    if threshold is not None:
        raise ValueError(
            f"threshold={threshold} is for one score per target, (N,) or (N, 1), got outputs {tuple(logits.shape)}: "
            "the class with the largest of several scores is the predicted one"
        )


def num_outside(values: Tensor, *, of: str) -> Tensor | int:
    """Count the values outside of [0, 1], () int64, for :func:`check_none_outside`; no host sync.

    NaN is outside for targets. As outputs it is not, so that the metric becomes NaN.

    Args:
        of: "targets" or "outputs".
    Raises:
        ValueError: there are some on the CPU, where reading is free.
    """
    if values.dtype is torch.bool or not values.numel():
        return 0
    # Interpolated probabilities may exceed 1 by a rounding error.
    if values.device.type in _FREE_TO_READ:
        low, high = (float(each) for each in values.aminmax())
        if low < -0.01 or high > 1.01 or (of == "targets" and math.isnan(low)):
            raise ValueError(f"{of} must be in [0, 1], got {low:g} to {high:g}; {_OUTSIDE[of]}")
        return 0
    distance = (values - 0.5).abs()
    return (~(distance <= 0.51) if of == "targets" else distance > 0.51).sum()


def check_none_outside(count: Tensor | int, *, of: str) -> None:
    """Raise if values of `of` were counted by :func:`num_outside`; this synchronizes with the device.

    Raises:
        ValueError: the count is not 0.
    """
    if count:
        raise ValueError(f"{of} must be in [0, 1], got {int(count)} values outside; {_OUTSIDE[of]}")


_OUTSIDE = {
    "targets": "remove rows to ignore from what the metric gets, in handle_batch; one-hot encode class indices",
    "outputs": "pass threshold=0 if they are logits, or their sigmoid",
}


def num_negative(relevances: Tensor) -> Tensor | int:
    """Count the relevances that are negative or NaN, () int64, for :func:`check_none_negative`; no host sync.

    Raises:
        ValueError: there are some on the CPU, where reading is free.
    """
    if relevances.dtype is torch.bool or not relevances.numel():
        return 0
    count = (~(relevances >= 0)).sum()
    if relevances.device.type in _FREE_TO_READ:
        check_none_negative(int(count))
        return 0
    return count


def check_none_negative(count: Tensor | int) -> None:
    """Raise if relevances were counted by :func:`num_negative`; this synchronizes with the device.

    Raises:
        ValueError: the count is not 0.
    """
    if count:
        raise ValueError(
            f"{int(count)} relevances are negative or NaN; set those of unknown items to 0, or remove their rows from "
            "what the metric gets, in handle_batch"
        )


def check_classes(indices: Tensor, *, num_classes: int, name: str = "targets") -> None:
    """Raise if indices are fractions or outside [0, C); this synchronizes with the device.

    Raises:
        ValueError: some indices are invalid.
    """
    if indices.is_floating_point() and not torch.equal(indices, indices.floor()):
        raise ValueError(f"{name} must be class indices in [0, {num_classes}), got fractions")
    if len(indices):
        low, high = (round(each) for each in torch.stack(indices.aminmax()).tolist())
        if low < 0 or high >= num_classes:
            raise ValueError(f"{name} must be class indices in [0, {num_classes}), got {low} to {high}; {_LEAVE_OUT}")


def check_all_classes(num_outside: dict[str, Tensor], *, num_classes: int) -> None:
    """Raise if indices outside [0, C) were counted; `num_outside` has () integers by name, over all processes.

    Raises:
        ValueError: a count is not 0.
    """
    for name, count in num_outside.items():
        if count:
            raise ValueError(f"{int(count)} {name} are outside of [0, {num_classes}); {_LEAVE_OUT}")


def _with_others_last(indices: Tensor, *, num_classes: int) -> Tensor:
    whole = indices.long()
    is_class = (whole >= 0) & (whole < num_classes)
    if indices.is_floating_point():
        is_class &= whole == indices
    return torch.where(is_class, whole, num_classes)


def count_indices(indices: Tensor, *, num_classes: int, weights: Tensor | None = None) -> Tensor:
    """Count how often each class is in `indices`, (M,) int64: (C,) int64; no host sync, unlike ``bincount``."""
    ones = torch.ones_like(indices) if weights is None else weights.to(indices.dtype)
    return torch.zeros(num_classes, dtype=indices.dtype, device=indices.device).scatter_add_(0, indices, ones)


def numbered_classes(num_classes: int) -> list[str]:
    """Return default class names: class_00 and so on."""
    return [f"class_{index:02d}" for index in range(num_classes)]


def by_class(name: str, values: Tensor, class_names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Return values of classes, (C,), by the names of metrics, such as f1/class_00."""
    class_names = class_names or numbered_classes(len(values))
    return {f"{name}/{each}": value for each, value in zip(class_names, values, strict=True)}


def _checked_classes(found: int, expected: int | None) -> int:
    if expected is not None and found != expected:
        raise ValueError(f"outputs have {found} classes, num_classes is {expected}")
    return found


def check_multilabel(scores: Tensor, targets: Tensor) -> None:
    """Raise unless there is one score and one 0/1 target for each sample and class.

    Raises:
        ValueError: the shapes differ.
    """
    if scores.ndim != 2 or scores.shape != targets.shape:
        raise ValueError(
            f"expected scores (N, C) and 0/1 targets (N, C), got {tuple(scores.shape)} and {tuple(targets.shape)}; one "
            "score or class index per sample is for the metrics without Multilabel in their name"
        )
