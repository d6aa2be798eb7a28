"""Which samples are of which class, and so many of them at random."""

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
        ValueError: there are none, or they are not one for each sample.

    >>> indices_by_class(["cat", "dog", "cat"])
    {'cat': tensor([0, 2]), 'dog': tensor([1])}
    """
    values = np.asarray(labels)
    if values.ndim != 1 or not len(values):
        raise ValueError(f"labels must be one for each sample, (N,) with N >= 1; got shape {values.shape}")
    classes, class_of, counts = np.unique(values, return_inverse=True, return_counts=True)
    by_class = np.split(np.argsort(class_of, kind="stable"), np.cumsum(counts)[:-1])
    return {label: torch.from_numpy(each) for label, each in zip(classes.tolist(), by_class, strict=True)}


def draw(indices: Tensor, count: int) -> Tensor:
    """Draw `count` of `indices` from torch's global generator.

    None is drawn once more than another before all are: as often as it takes they are taken whole, and what is left to
    draw is drawn without replacement.
    """
    whole, rest = divmod(count, len(indices))
    return torch.cat([indices.repeat(whole), indices[torch.randperm(len(indices))[:rest]]])


def shuffled(parts: Sequence[Tensor]) -> list[int]:
    """Join (n,) int64 tensors, in an order from torch's global generator."""
    joined = torch.cat(list(parts))
    return joined[torch.randperm(len(joined))].tolist()
