"""Metrics of recommenders and retrieval: means over rows, each a list of items ranked by their scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.loader_sums import LoaderSumsCallback, Sums, ratio
from runnerkit.callbacks.metrics.parts.topk import checked_topk
from runnerkit.metrics.retrieval_scores import average_precision, hit_rate, ndcg, ranked, reciprocal_rank

__all__ = ["HitrateCallback", "MAPCallback", "MRRCallback", "NDCGCallback"]


class _RankingCallback(LoaderSumsCallback):
    name: str
    rows: Callable[..., Tensor]  # (relevances (N, M) in the order of the scores, k=k) -> each row's value, (N,)

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

    def count(self, *inputs: Tensor) -> Sums:
        relevance = ranked(*inputs)
        values = {f"{self.name}{k:02d}": self.rows(relevance, k=k).sum() for k in self.topk}
        return {**values, "num": relevance.new_full((), len(relevance), dtype=torch.int64)}

    def values(self, sums: Sums) -> Sums:
        return {name: ratio(each, sums["num"], zero_division=0) for name, each in sums.items() if name != "num"}


class HitrateCallback(_RankingCallback):
    """Log ``hitrate01`` and so on: the fraction of a row's relevant items that are among its top k, averaged over rows.

    Args:
        input_key: scores (N, M) of M items in ``runner.batch``.
        target_key: their relevances (N, M), 0 and 1, in ``runner.batch``.
        topk: one or several k; by default 1. A k above M acts as M.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        prefix, suffix: added to the names.

    >>> HitrateCallback("scores", "targets", topk=(1, 10)).provides
    ('hitrate01', 'hitrate10')
    """

    name = "hitrate"
    rows = staticmethod(hit_rate)


class MRRCallback(_RankingCallback):
    """Log ``mrr01`` and so on: 1 / rank of the first relevant item; arguments as in :class:`HitrateCallback`.

    >>> MRRCallback("scores", "targets", topk=3).provides
    ('mrr03',)
    """

    name = "mrr"
    rows = staticmethod(reciprocal_rank)


class MAPCallback(_RankingCallback):
    """Log ``map01`` and so on: the mean average precision; arguments as in :class:`HitrateCallback`.

    >>> MAPCallback("scores", "targets", topk=3).provides
    ('map03',)
    """

    name = "map"
    rows = staticmethod(average_precision)


class NDCGCallback(_RankingCallback):
    """Log ``ndcg01`` and so on: the normalized discounted cumulative gain; arguments as in :class:`HitrateCallback`.

    Relevances may be graded; the gain of a grade g is 2^g - 1.

    >>> NDCGCallback("scores", "targets", topk=3).provides
    ('ndcg03',)
    """

    name = "ndcg"
    rows = staticmethod(ndcg)
