"""Metrics of recommenders and retrieval: the mean over rows, each a list of items that was ranked by its scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from runnerkit.callbacks.loader_sums import LoaderSumsCallback, Sums, ratio
from runnerkit.callbacks.topk import checked_topk
from runnerkit.ranking import average_precision, hit_rate, ndcg, ranked, reciprocal_rank


class _RankingCallback(LoaderSumsCallback, ABC):
    name: str

    def __init__(
        self,
        input_key: str,
        target_key: str,
        topk: int | Iterable[int] | None = None,
        *,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(
            input_key=input_key, target_key=target_key, log_on_batch=log_on_batch, prefix=prefix, suffix=suffix
        )
        self.topk = checked_topk(self, topk)
        self.provides = tuple(f"{self.prefix}{self.name}{k:02d}{self.suffix}" for k in self.topk)

    @abstractmethod
    def rows(self, relevance: Tensor, *, k: int) -> Tensor:
        """Give each row's value, (N,), from relevances (N, M) in the order of the scores."""

    def count(self, *inputs: Tensor) -> Sums:
        relevance = ranked(*inputs)
        values = {f"{self.name}{k:02d}": self.rows(relevance, k=k).sum() for k in self.topk}
        return {**values, "num": relevance.new_full((), len(relevance), dtype=torch.int64)}

    def values(self, sums: Sums) -> Sums:
        return {name: ratio(each, sums["num"], zero_division=0) for name, each in sums.items() if name != "num"}


class HitrateCallback(_RankingCallback):
    """Log ``hitrate01`` and so on: the share of a row's relevant items among its k best scored, mean over rows.

    Args:
        input_key: scores (N, M) of M items in ``runner.batch``.
        target_key: their relevances (N, M), 0 and 1, in ``runner.batch``.
        topk: one k, or several; by default 1. A k beyond M is M.
        log_on_batch: whether ``runner.batch_metrics`` gets the batch's values.
        prefix, suffix: around the names.

    >>> HitrateCallback("scores", "targets", topk=(1, 10)).provides
    ('hitrate01', 'hitrate10')
    """

    name = "hitrate"

    def rows(self, relevance: Tensor, *, k: int) -> Tensor:
        return hit_rate(relevance, k=k)


class MRRCallback(_RankingCallback):
    """Log ``mrr01`` and so on: 1 / place of the first relevant item; arguments as of :class:`HitrateCallback`.

    >>> MRRCallback("scores", "targets", topk=3).provides
    ('mrr03',)
    """

    name = "mrr"

    def rows(self, relevance: Tensor, *, k: int) -> Tensor:
        return reciprocal_rank(relevance, k=k)


class MAPCallback(_RankingCallback):
    """Log ``map01`` and so on: the mean average precision; arguments as of :class:`HitrateCallback`.

    >>> MAPCallback("scores", "targets", topk=3).provides
    ('map03',)
    """

    name = "map"

    def rows(self, relevance: Tensor, *, k: int) -> Tensor:
        return average_precision(relevance, k=k)


class NDCGCallback(_RankingCallback):
    """Log ``ndcg01`` and so on: the normalised discounted cumulative gain; arguments as of :class:`HitrateCallback`.

    Relevances may be grades; the gain of a grade g is 2^g - 1.

    >>> NDCGCallback("scores", "targets", topk=3).provides
    ('ndcg03',)
    """

    name = "ndcg"

    def rows(self, relevance: Tensor, *, k: int) -> Tensor:
        return ndcg(relevance, k=k)
