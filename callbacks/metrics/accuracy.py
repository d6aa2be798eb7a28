"""Accuracy of classification: top-k, and of multilabel decisions."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics.classification import AccuracyMetric, MultilabelAccuracyMetric
from runnerkit.support.deprecation import Renamed, accepts_old_names

__all__ = ["AccuracyCallback", "MultilabelAccuracyCallback"]


class AccuracyCallback(ObjectMetricCallback):
    """Log ``accuracy`` (top-1), ``accuracy03`` (top-3) and so on, for each k in `topk`.

    Args:
        input_key, target_key: keys of logits (N, C) and class indices (N,) int64 in ``runner.batch``; by default
            `output_key` and `target_key` of the SupervisedRunner.
        threshold: a binary classifier's scores, (N,) or (N, 1) float, above it are class 1; 0 for logits, 0.5 for
            probabilities.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        topk, num_classes, prefix, suffix: see :class:`~runnerkit.metrics.AccuracyMetric`.

    >>> AccuracyCallback(topk=(1, 3)).provides
    ('accuracy', 'accuracy03')
    """

    @accepts_old_names(Renamed("topk_args", "topk"))
    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        topk: int | Iterable[int] | None = None,
        num_classes: int | None = None,
        *,
        threshold: float | None = None,
        log_on_batch: bool = True,
        prefix: str | None = "",
        suffix: str | None = "",
    ) -> None:
        metric = AccuracyMetric(topk, num_classes, threshold=threshold, prefix=prefix, suffix=suffix)
        super().__init__(metric, log_on_batch=log_on_batch, input_key=input_key, target_key=target_key)


class MultilabelAccuracyCallback(ObjectMetricCallback):
    """Log ``accuracy``: the fraction of correct decisions among all N * C pairs of sample and label.

    Args:
        input_key, target_key: keys of scores and 0/1 targets, (N, C) each, in ``runner.batch``; by default `output_key`
            and `target_key` of the SupervisedRunner.
        log_on_batch: whether to put the batch's value into ``runner.batch_metrics``.
        threshold, prefix, suffix: see :class:`~runnerkit.metrics.MultilabelAccuracyMetric`.

    >>> MultilabelAccuracyCallback("scores", "targets", prefix="tag_").provides
    ('tag_accuracy',)
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        threshold: float | Tensor = 0.5,
        *,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        metric = MultilabelAccuracyMetric(threshold, prefix=prefix, suffix=suffix)
        super().__init__(metric, log_on_batch=log_on_batch, input_key=input_key, target_key=target_key)
