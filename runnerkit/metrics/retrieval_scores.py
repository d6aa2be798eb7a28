"""Retrieval metrics: one value per row, so that the mean over a data set is exact for any batch size."""

from __future__ import annotations

import torch
from torch import Tensor

from runnerkit.types import widest_float


def ranked(scores: Tensor, targets: Tensor) -> Tensor:
    """Sort the targets of each row by its scores, largest first; equal scores keep their order.

    Args:
        scores: (N, M), one score per item.
        targets: (N, M) relevances: 0 and 1, or grades >= 0.
    Returns:
        (N, M) float64, or float32 if the device does not support it; no host sync.
    Raises:
        ValueError: a shape is wrong.

    >>> ranked(torch.tensor([[0.1, 0.9, 0.5]]), torch.tensor([[1, 0, 1]]))
    tensor([[0., 1., 1.]], dtype=torch.float64)
    """
    if scores.ndim != 2 or scores.shape != targets.shape:
        raise ValueError(
            f"expected scores (N, M) and relevances (N, M) of M items, got {tuple(scores.shape)} and "
            f"{tuple(targets.shape)}"
        )
    order = scores.argsort(dim=1, descending=True, stable=True)
    return targets.gather(1, order).to(widest_float(scores.device))


def hit_rate(relevance: Tensor, *, k: int) -> Tensor:
    """Compute the fraction of a row's relevant items that are among the first k; 0 in a row without any.

    With one relevant item per row, this is 1 if the item is among the first k. `relevance` is from :func:`ranked`.

    >>> hit_rate(torch.tensor([[0.0, 1.0, 1.0]]), k=2)
    tensor([0.5000])
    """
    return _per_relevant(relevance[:, :k].sign().sum(dim=1), relevance.sign().sum(dim=1))


def reciprocal_rank(relevance: Tensor, *, k: int) -> Tensor:
    """Compute 1 / position of the first relevant item; 0 if it is not among the first k.

    >>> reciprocal_rank(torch.tensor([[0.0, 1.0, 1.0]]), k=2)
    tensor([0.5000])
    """
    return (relevance[:, :k].sign() / _places(relevance[:, :k])).amax(dim=1)


def average_precision(relevance: Tensor, *, k: int) -> Tensor:
    """Average the precision at the positions of the relevant items among the first k; 0 if there are none.

    >>> average_precision(torch.tensor([[1.0, 0.0, 1.0]]), k=3)
    tensor([0.8333])
    """
    hits = relevance[:, :k].sign()
    return _per_relevant((hits * hits.cumsum(dim=1) / _places(hits)).sum(dim=1), hits.sum(dim=1))


def ndcg(relevance: Tensor, *, k: int) -> Tensor:
    """Divide the gain 2^grade - 1, discounted by log2(position + 1), by that of the best order; 0 without any gain.

    Järvelin & Kekäläinen 2002, with the gain of Burges et al. 2005; for grades 0 and 1 both gains are equal.

    >>> ndcg(torch.tensor([[0.0, 1.0]]), k=2)
    tensor([0.6309])
    """
    best = relevance.sort(dim=1, descending=True).values
    gains = [((2 ** each[:, :k] - 1) / torch.log2(_places(each[:, :k]) + 1)).sum(dim=1) for each in (relevance, best)]
    return _per_relevant(*gains)


def _places(relevance: Tensor) -> Tensor:
    return torch.arange(1, relevance.shape[1] + 1, dtype=relevance.dtype, device=relevance.device)


def _per_relevant(value: Tensor, count: Tensor) -> Tensor:
    return torch.where(count == 0, 0, value / torch.where(count == 0, 1, count))
