"""Metrics of recommenders and retrieval: means over rows, each a list of items ranked by their scores."""

from __future__ import annotations

from collections.abc import Iterable

from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics import retrieval
from runnerkit.support.deprecation import Renamed, accepts_old_names

__all__ = ["HitrateCallback", "MAPCallback", "MRRCallback", "NDCGCallback"]


class _RankingCallback(ObjectMetricCallback):
    kind: type[retrieval.RankingMetric]

    @accepts_old_names(Renamed("topk_args", "topk"))
    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        topk: int | Iterable[int] | None = None,
        *,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        metric = self.kind(topk, prefix=prefix, suffix=suffix)
        super().__init__(metric, log_on_batch=log_on_batch, input_key=input_key, target_key=target_key)


class HitrateCallback(_RankingCallback):
    """Log ``hitrate01`` and so on: the fraction of a row's relevant items that are among its top k, averaged over rows.

    Args:
        input_key: key of scores (N, M) of M items in ``runner.batch``; by default the `output_key` of the
            SupervisedRunner.
        target_key: key of their relevances (N, M), 0 and 1, in ``runner.batch``; by default the runner's `target_key`.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        topk, prefix, suffix: see :class:`~runnerkit.metrics.HitrateMetric`.

    >>> HitrateCallback("scores", "targets", topk=(1, 10)).provides
    ('hitrate01', 'hitrate10')
    """

    kind = retrieval.HitrateMetric


class MRRCallback(_RankingCallback):
    """Log ``mrr01`` and so on: 1 / rank of the first relevant item; arguments as in :class:`HitrateCallback`.

    >>> MRRCallback("scores", "targets", topk=3).provides
    ('mrr03',)
    """

    kind = retrieval.MRRMetric


class MAPCallback(_RankingCallback):
    """Log ``map01`` and so on: the mean average precision; arguments as in :class:`HitrateCallback`.

    >>> MAPCallback("scores", "targets", topk=3).provides
    ('map03',)
    """

    kind = retrieval.MAPMetric


class NDCGCallback(_RankingCallback):
    """Log ``ndcg01`` and so on: the normalized discounted cumulative gain; arguments as in :class:`HitrateCallback`.

    Relevances may be graded; the gain of a grade g is 2^g - 1.

    >>> NDCGCallback("scores", "targets", topk=3).provides
    ('ndcg03',)
    """

    kind = retrieval.NDCGMetric
