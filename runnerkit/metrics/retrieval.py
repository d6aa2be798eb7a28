"""Metrics of recommenders and retrieval: means over rows, each a list of items ranked by their scores."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runnerkit.metrics.class_indices import check_none_negative, num_negative
from runnerkit.metrics.metric import Sums, SumsMetric, checked_topk, ratio
from runnerkit.support.deprecation import Renamed, accepts_old_names
from runnerkit.types import widest_float

__all__ = [
    "HitrateMetric",
    "MAPMetric",
    "MRRMetric",
    "NDCGMetric",
    "average_precision",
    "hitrate",
    "map_score",
    "mrr",
    "ndcg",
]


def hitrate(scores: Tensor, targets: Tensor, topk: Sequence[int]) -> list[Tensor]:
    """Compute the fraction of a row's relevant items that are among its top k, averaged over rows.

    Args:
        scores: (N, M) of M items.
        targets: (N, M) relevances, 0 and 1.
        topk: one or several k; a k above M acts as M.
    Returns:
        One () tensor in [0, 1] for each k, NaN without rows or if a score is NaN, float64 if the device supports it; no
        host sync.
    Raises:
        ValueError: a shape is wrong, or a k is not an integer >= 1. On the CPU, also if a relevance is negative or NaN.

    >>> hitrate(torch.tensor([[0.1, 0.9, 0.5]]), torch.tensor([[1, 1, 0]]), [1, 3])
    [tensor(0.5000, dtype=torch.float64), tensor(1., dtype=torch.float64)]
    """
    return _of_batch(HitrateMetric(topk), scores, targets)


def mrr(scores: Tensor, targets: Tensor, topk: Sequence[int]) -> list[Tensor]:
    """Compute the mean of 1 / rank of the first relevant item, 0 beyond k; see :func:`hitrate`.

    >>> mrr(torch.tensor([[0.1, 0.9, 0.5]]), torch.tensor([[0, 0, 1]]), [3])
    [tensor(0.5000, dtype=torch.float64)]
    """
    return _of_batch(MRRMetric(topk), scores, targets)


def map_score(scores: Tensor, targets: Tensor, topk: Sequence[int]) -> list[Tensor]:
    """Compute the mean average precision; see :func:`hitrate` and :func:`average_precision`.

    >>> map_score(torch.tensor([[0.9, 0.5, 0.1]]), torch.tensor([[1, 0, 1]]), [3])
    [tensor(0.8333, dtype=torch.float64)]
    """
    return _of_batch(MAPMetric(topk), scores, targets)


def ndcg(scores: Tensor, targets: Tensor, topk: Sequence[int]) -> list[Tensor]:
    """Compute the mean normalized discounted cumulative gain of relevances, which may be graded; see :func:`hitrate`.

    Järvelin & Kekäläinen 2002, with the gain 2^grade - 1 of Burges et al. 2005; for 0 and 1 both gains are equal.

    >>> ndcg(torch.tensor([[0.9, 0.1]]), torch.tensor([[0, 1]]), [2])
    [tensor(0.6309, dtype=torch.float64)]
    """
    return _of_batch(NDCGMetric(topk), scores, targets)


def average_precision(scores: Tensor, targets: Tensor, k: int) -> Tensor:
    """Average the precision at the positions of a row's relevant items among the first k; 0 if there are none.

    Args:
        scores, targets: see :func:`hitrate`.
        k: >= 1.
    Returns:
        (N,), float64 if the device supports it; no host sync.

    >>> average_precision(torch.tensor([[0.9, 0.5, 0.1]]), torch.tensor([[1, 0, 1]]), 3)
    tensor([0.8333], dtype=torch.float64)
    """
    [k] = checked_topk("average_precision", k)
    num_negative(targets)
    return _where_known(scores, MAPMetric.rows(ranked(scores, targets), k=k))


def _of_batch(metric: RankingMetric, scores: Tensor, targets: Tensor) -> list[Tensor]:
    return list(metric.values(metric.count(scores, targets)).values())


class RankingMetric(SumsMetric):
    """Base class of the metrics of this module."""

    name: str

    @staticmethod
    @abstractmethod
    def rows(relevance: Tensor, *, k: int) -> Tensor:
        """Return the value of each row, (N,), from the (N, M) relevances of :func:`ranked`."""

    @accepts_old_names(Renamed("topk_args", "topk"))
    def __init__(
        self, topk: int | Iterable[int] | None = None, *, prefix: str | None = None, suffix: str | None = None
    ) -> None:
        self.topk = checked_topk(self, topk)
        self._ks = {f"{self.name}{k:02d}": k for k in self.topk}
        super().__init__(self._ks, prefix=prefix, suffix=suffix)

    def count(self, scores: Tensor, targets: Tensor) -> Sums:
        relevance = ranked(scores.detach(), targets.detach())
        sums: Sums = {name: _where_known(scores, self.rows(relevance, k=k)).sum() for name, k in self._ks.items()}
        num = relevance.new_full((), len(relevance), dtype=torch.int64)
        return {**sums, "num": num, "negative": num_negative(targets)}

    def check_total(self, sums: Sums) -> None:
        check_none_negative(sums.get("negative", 0))

    def values(self, sums: Sums) -> Sums:
        return {name: ratio(sums[name], sums["num"], zero_division=math.nan) for name in self._ks}


def _where_known(scores: Tensor, values: Tensor) -> Tensor:
    """Return the values of rows, (N,), with NaN for those with a score that is NaN, which cannot be ranked."""
    return torch.where(scores.isnan().any(dim=1), torch.nan, values)


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
    if scores.ndim != 2 or scores.shape != targets.shape or not scores.shape[1]:
        raise ValueError(
            f"expected scores (N, M) and relevances (N, M) of M items, got {tuple(scores.shape)} and "
            f"{tuple(targets.shape)}"
        )
    order = scores.argsort(dim=1, descending=True, stable=True)
    return targets.gather(1, order).to(widest_float(scores.device))


def _places(relevance: Tensor) -> Tensor:
    return torch.arange(1, relevance.shape[1] + 1, dtype=relevance.dtype, device=relevance.device)


def _per_relevant(value: Tensor, count: Tensor) -> Tensor:
    return torch.where(count == 0, 0, value / torch.where(count == 0, 1, count))


class HitrateMetric(RankingMetric):
    """Values ``hitrate01`` and so on, of :func:`hitrate`. Update with scores and relevances (N, M) of M items.

    Args:
        topk: one or several k; by default 1. A k above M acts as M.
        prefix, suffix: added to the names.

    >>> metric = HitrateMetric(topk=(1, 3))
    >>> metric.update(torch.tensor([[0.1, 0.9, 0.5]]), torch.tensor([[1, 1, 0]]))
    >>> metric.compute_key_value()
    {'hitrate01': 0.5, 'hitrate03': 1.0}
    """

    name = "hitrate"

    @staticmethod
    def rows(relevance: Tensor, *, k: int) -> Tensor:
        """Return the fraction of a row's relevant items that are among the first k; 0 without any."""
        return _per_relevant(relevance[:, :k].sign().sum(dim=1), relevance.sign().sum(dim=1))


class MRRMetric(RankingMetric):
    """Values ``mrr01`` and so on, of :func:`mrr`; arguments as in :class:`HitrateMetric`.

    >>> MRRMetric(topk=3).names
    ('mrr03',)
    """

    name = "mrr"

    @staticmethod
    def rows(relevance: Tensor, *, k: int) -> Tensor:
        """Return 1 / position of the first relevant item; 0 if it is not among the first k."""
        return (relevance[:, :k].sign() / _places(relevance[:, :k])).amax(dim=1)


class MAPMetric(RankingMetric):
    """Values ``map01`` and so on, of :func:`map_score`; arguments as in :class:`HitrateMetric`.

    >>> MAPMetric(topk=3).names
    ('map03',)
    """

    name = "map"

    @staticmethod
    def rows(relevance: Tensor, *, k: int) -> Tensor:
        """Average the precision at the positions of the relevant items among the first k; 0 if there are none."""
        hits = relevance[:, :k].sign()
        return _per_relevant((hits * hits.cumsum(dim=1) / _places(hits)).sum(dim=1), hits.sum(dim=1))


class NDCGMetric(RankingMetric):
    """Values ``ndcg01`` and so on, of :func:`ndcg`; arguments as in :class:`HitrateMetric`.

    >>> NDCGMetric(topk=3).names
    ('ndcg03',)
    """

    name = "ndcg"

    @staticmethod
    def rows(relevance: Tensor, *, k: int) -> Tensor:
        """Divide the gain 2^grade - 1, discounted by log2(position + 1), by that of the best order; 0 without any."""
        best = relevance.sort(dim=1, descending=True).values
        gains = [((2**top - 1) / torch.log2(_places(top) + 1)).sum(dim=1) for top in (relevance[:, :k], best[:, :k])]
        return _per_relevant(*gains)
