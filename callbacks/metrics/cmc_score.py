"""Cumulative matching characteristic."""

from __future__ import annotations

from collections.abc import Iterable

from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics.matching import CMCMetric
from runnerkit.support.deprecation import Renamed, accepts_old_names

__all__ = ["CMCScoreCallback"]


class CMCScoreCallback(ObjectMetricCallback):
    """Log ``cmc01`` and so on: the fraction of queries whose label is among their k nearest neighbors in the gallery.

    Queries and gallery are samples of one loader; use ``ControlFlowCallback`` to select that loader.

    Args:
        embeddings_key, labels_key: keys of (N, D) float and (N,) in ``runner.batch``; by default `output_key` and
            `target_key` of the SupervisedRunner.
        is_query_key: key of (N,) bool in ``runner.batch``; the other samples are the gallery.
        topk, prefix, suffix: see :class:`~runnerkit.metrics.CMCMetric`.

    >>> CMCScoreCallback("embeddings", "labels", "is_query", topk=(1, 5)).provides
    ('cmc01', 'cmc05')
    """

    @accepts_old_names(Renamed("topk_args", "topk"))
    def __init__(
        self,
        embeddings_key: str | None = None,
        labels_key: str | None = None,
        is_query_key: str = "is_query",
        topk: int | Iterable[int] | None = None,
        *,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(
            CMCMetric(topk, prefix=prefix, suffix=suffix),
            log_on_batch=False,
            embeddings_key=embeddings_key,
            labels_key=labels_key,
            is_query_key=is_query_key,
        )
