"""Overlap of masks: IoU (Jaccard), Dice (F1) and the Tversky index, which generalizes both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics.segmentation import DiceMetric, IOUMetric, TrevskyMetric, TverskyMetric
from runnerkit.support.deprecation import warn_of_argument

__all__ = ["DiceCallback", "IOUCallback", "TrevskyCallback", "TverskyCallback"]


class IOUCallback(ObjectMetricCallback):
    """Log ``iou``, the mean over classes of hits / (hits + false alarms + misses), and ``iou/_micro`` of all pixels.

    Args:
        input_key: key of probabilities or masks (N, C, ...) in ``runner.batch``; by default the `output_key` of the
            SupervisedRunner.
        target_key: key of 0/1 masks of the same shape in ``runner.batch``; by default the runner's `target_key`.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        class_dim, weights, class_names, threshold, compute_per_class_metrics, prefix, suffix: see
            :class:`~runnerkit.metrics.IOUMetric`.

    >>> IOUCallback("masks", "targets", threshold=0.5).provides
    ('iou', 'iou/_macro', 'iou/_micro')
    """

    kind: type[IOUMetric | DiceMetric] = IOUMetric

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        class_dim: int = 1,
        weights: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        threshold: float | None = None,
        *,
        log_on_batch: bool = True,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        metric = self.kind(
            class_dim, weights, class_names, threshold,
            compute_per_class_metrics=compute_per_class_metrics, prefix=prefix, suffix=suffix,
        )  # fmt: skip
        super().__init__(metric, log_on_batch=log_on_batch, input_key=input_key, target_key=target_key)


class DiceCallback(IOUCallback):
    """Log ``dice``, 2 * hits / (2 * hits + false alarms + misses); arguments as in :class:`IOUCallback`.

    >>> DiceCallback("masks", "targets").provides
    ('dice', 'dice/_macro', 'dice/_micro')
    """

    kind = DiceMetric


class TverskyCallback(ObjectMetricCallback):
    """Log ``tversky``, the Tversky index hits / (hits + beta * false alarms + alpha * misses).

    Args:
        alpha: weight of misses; by default 0.5, which makes it the Dice score if `beta` is not given.
        beta: weight of false alarms; by default 1 - alpha, for an `alpha` in (0, 1).
        input_key, target_key: see :class:`IOUCallback`, also for the other arguments.

    >>> TverskyCallback("masks", "targets", alpha=0.3).provides[0]
    'tversky'
    """

    kind: type[TverskyMetric] = TverskyMetric

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        alpha: float = 0.5,
        beta: float | None = None,
        class_dim: int = 1,
        weights: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        threshold: float | None = None,
        *,
        log_on_batch: bool = True,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        metric = self.kind(
            alpha, beta, class_dim, weights, class_names, threshold,
            compute_per_class_metrics=compute_per_class_metrics, prefix=prefix, suffix=suffix,
        )  # fmt: skip
        super().__init__(metric, log_on_batch=log_on_batch, input_key=input_key, target_key=target_key)


class TrevskyCallback(TverskyCallback):
    """The former, misspelt name of :class:`TverskyCallback`, which logs ``trevsky``; deprecated."""

    kind = TrevskyMetric

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        instead = "TverskyCallback, which logs 'tversky'"
        warn_of_argument("TrevskyCallback", instead=instead)
        super().__init__(*args, **kwargs)
