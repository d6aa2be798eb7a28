"""Sample indices by class, and random draws from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

Labels: TypeAlias = Sequence[Any] | np.ndarray[Any, Any] | Tensor


def indices_by_class(labels: Labels) -> dict[Any, Tensor]:
    """Group the positions of `labels` by their value.

    Args:
        labels: (N,) ints or strings.
    Returns:
        {label: (n,) int64, ascending}, sorted by label.
    Raises:
        ValueError: `labels` is empty or not one-dimensional.

    >>> indices_by_class(["cat", "dog", "cat"])
    {'cat': tensor([0, 2]), 'dog': tensor([1])}
    """
    values = np.asarray(labels)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"labels must have one label per sample, (N,) with N >= 1; got shape {values.shape}")
    classes, class_of, counts = np.unique(values, return_inverse=True, return_counts=True)
    by_class = np.split(np.argsort(class_of, kind="stable"), np.cumsum(counts)[:-1])
    return {label: torch.from_numpy(each) for label, each in zip(classes.tolist(), by_class, strict=True)}


def draw(indices: Tensor, count: int) -> Tensor:
    """Draw `count` of `indices` with torch's global generator.

    All indices are repeated as often as they fit into `count`; the rest is drawn without replacement.
    """
    whole, rest = divmod(count, len(indices))
    return torch.cat([indices.repeat(whole), indices[torch.randperm(len(indices))[:rest]]])


def shuffled(parts: Sequence[Tensor]) -> list[int]:
    """Concatenate (n,) int64 tensors and shuffle them with torch's global generator."""
    joined = torch.cat(list(parts))
    return joined[torch.randperm(len(joined))].tolist()
