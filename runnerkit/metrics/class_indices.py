"""Predicted and true classes of a classifier, as validated class indices."""

from __future__ import annotations

import torch
from torch import Tensor

_FREE_TO_READ = frozenset({"cpu"})
_LEAVE_OUT = "remove rows to ignore (ignore_index) from what the metric gets, in handle_batch"


def class_indices(outputs: Tensor, targets: Tensor, *, num_classes: int | None) -> tuple[Tensor, Tensor, int]:
    """Return predicted and true class of every sample, (M,) int64 each, and the number of classes.

    Invalid indices become C, which is counted separately and refused by :func:`check_all_classes` when a value is read:
    an earlier check would cost a host sync, and scattering an invalid index on a GPU would end the process.

    Args:
        outputs: logits (N, C, ...), or class indices with the shape of `targets`, which need `num_classes`.
        targets: class indices (N, ...).
        num_classes: C; None takes it from the logits.
    Raises:
        ValueError: shapes do not match. On the CPU, where a check is free, also if an index is outside [0, C).
    """
    if outputs.ndim == targets.ndim + 1:
        num_classes, outputs = _checked_classes(outputs.shape[1], num_classes), outputs.argmax(dim=1)
    if outputs.shape != targets.shape:
        raise ValueError(
            f"expected logits (N, C, ...) and targets (N, ...), got {tuple(outputs.shape)} and {tuple(targets.shape)}"
        )
    if num_classes is None:
        raise ValueError("outputs are class indices, not logits: pass num_classes=")
    outputs, targets = outputs.reshape(-1).long(), targets.reshape(-1).long()
    if targets.device.type in _FREE_TO_READ:
        for name, indices in (("targets", targets), ("outputs", outputs)):
            check_classes(indices, num_classes=num_classes, name=name)
    outputs, targets = (_or_beyond(each, num_classes=num_classes) for each in (outputs, targets))
    return outputs, targets, num_classes


def check_classes(indices: Tensor, *, num_classes: int, name: str = "targets") -> None:
    """Raise if indices are outside [0, C); this synchronizes with the device.

    Raises:
        ValueError: some indices are invalid.
    """
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


def _or_beyond(indices: Tensor, *, num_classes: int) -> Tensor:
    return torch.where((indices >= 0) & (indices < num_classes), indices, num_classes)


def count_indices(indices: Tensor, *, num_classes: int, weights: Tensor | None = None) -> Tensor:
    """Count how often each class is in `indices`, (M,) int64: (C,) int64; no host sync, unlike ``bincount``."""
    ones = torch.ones_like(indices) if weights is None else weights.to(indices.dtype)
    return torch.zeros(num_classes, dtype=indices.dtype, device=indices.device).scatter_add_(0, indices, ones)


def numbered_classes(num_classes: int) -> list[str]:
    """Return default class names: class_00 and so on."""
    return [f"class_{index:02d}" for index in range(num_classes)]


def _checked_classes(found: int, expected: int | None) -> int:
    if expected is not None and found != expected:
        raise ValueError(f"logits have {found} classes, num_classes is {expected}")
    return found


def check_multilabel(scores: Tensor, targets: Tensor) -> None:
    """Raise unless there is one score and one 0/1 target for each sample and class.

    Raises:
        ValueError: the shapes differ.
    """
    if scores.ndim != 2 or scores.shape != targets.shape:
        raise ValueError(
            f"expected scores (N, C) and 0/1 targets (N, C), got {tuple(scores.shape)} and {tuple(targets.shape)}"
        )
