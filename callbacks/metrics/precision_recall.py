"""Precision, recall, F1 and support, per class and averaged over classes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerkit.callbacks.metrics.parts.figures import MAX_CLASSES, draw_table, log_drawn
from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics.class_indices import numbered_classes
from runnerkit.metrics.metric import Metric
from runnerkit.metrics.precision_recall import MultilabelPrecisionRecallF1SupportMetric, PrecisionRecallF1SupportMetric

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["MultilabelPrecisionRecallF1SupportCallback", "PrecisionRecallF1SupportCallback"]


class _PrecisionRecallCallback(ObjectMetricCallback):
    kind: type[PrecisionRecallF1SupportMetric | MultilabelPrecisionRecallF1SupportMetric]

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        num_classes: int | None = None,
        zero_division: float = 0,
        *,
        threshold: float | None = None,
        log_on_batch: bool = True,
        log_table: bool = True,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        metric = self.kind(
            num_classes, zero_division, threshold=threshold,
            compute_per_class_metrics=compute_per_class_metrics, prefix=prefix, suffix=suffix,
        )  # fmt: skip
        super().__init__(metric, log_on_batch=log_on_batch, input_key=input_key, target_key=target_key)
        self.log_table = log_table

    def show(self, runner: IRunner, state: Metric) -> None:
        if not self.log_table:
            return
        assert isinstance(state, PrecisionRecallF1SupportMetric | MultilabelPrecisionRecallF1SupportMetric)
        columns = {name: each.tolist() for name, each in state.by_class().items()}
        classes = numbered_classes(len(columns["support"]))
        table, tag = {"class": classes, **columns}, f"{state.prefix}f1{state.suffix}/by_class"
        runner.log_table(tag, table)
        if len(classes) <= MAX_CLASSES:
            log_drawn(runner, tag, lambda: draw_table(table, title=tag))


class PrecisionRecallF1SupportCallback(_PrecisionRecallCallback):
    """Log ``precision/_micro``, ``/_macro``, ``/_weighted``, and ``recall``, ``f1`` likewise, of a classifier.

    At the end of each loader, the values of each class are logged as a table, to ``tables/f1/by_class.csv``, and for up
    to 50 classes as an image.

    Args:
        input_key: key of logits (N, C, ...) in ``runner.batch``, or class indices (N, ...), which need `num_classes`;
            by default the `output_key` of the SupervisedRunner.
        target_key: key of class indices (N, ...) int64 in ``runner.batch``; by default the runner's `target_key`.
        threshold: a binary classifier's scores, (N,) or (N, 1) float, above it are class 1; 0 for logits, 0.5 for
            probabilities.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        log_table: log the values of each class.
        num_classes, zero_division, compute_per_class_metrics, prefix, suffix: see
            :class:`~runnerkit.metrics.PrecisionRecallF1SupportMetric`.

    >>> PrecisionRecallF1SupportCallback("logits", "targets", prefix="my_").provides[:2]
    ('my_precision/_micro', 'my_precision/_macro')
    """

    kind = PrecisionRecallF1SupportMetric


class MultilabelPrecisionRecallF1SupportCallback(_PrecisionRecallCallback):
    """Log precision, recall and F1 of scores (N, C) against 0/1 targets (N, C), and the table of classes.

    Args:
        input_key, target_key: keys of scores and 0/1 targets, (N, C) each, in ``runner.batch``; by default `output_key`
            and `target_key` of the SupervisedRunner.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        log_table: log the values of each class.
        num_classes, zero_division, threshold, compute_per_class_metrics, prefix, suffix: see
            :class:`~runnerkit.metrics.MultilabelPrecisionRecallF1SupportMetric`.

    >>> MultilabelPrecisionRecallF1SupportCallback("scores", "targets").provides[-1]
    'f1/_weighted'
    """

    kind = MultilabelPrecisionRecallF1SupportMetric
