"""Area under the ROC curve."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerkit.callbacks.metrics.parts.figures import MAX_CURVES, draw_curves, log_drawn
from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics.class_indices import numbered_classes
from runnerkit.metrics.metric import Metric
from runnerkit.metrics.roc import AUCMetric

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["AUCCallback"]


class AUCCallback(ObjectMetricCallback):
    """Log ``auc`` and ``auc/_macro``, both the mean over classes, ``auc/_micro`` and ``auc/_weighted``.

    At the end of each loader, the ROC and precision-recall curves of up to 20 classes are logged as an image, if a
    logger accepts images, and as a table, to ``tables/auc/curves.csv``.

    Args:
        input_key, target_key: keys of scores (N, C) and targets in ``runner.batch``, as in
            :func:`~runnerkit.metrics.auc`; by default `output_key` and `target_key` of the SupervisedRunner.
        log_curves: log the curves.
        compute_per_class_metrics, prefix, suffix: see :class:`~runnerkit.metrics.AUCMetric`.

    >>> AUCCallback("scores", "targets").provides
    ('auc', 'auc/_micro', 'auc/_macro', 'auc/_weighted')
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        *,
        log_curves: bool = True,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        metric = AUCMetric(compute_per_class_metrics=compute_per_class_metrics, prefix=prefix, suffix=suffix)
        super().__init__(metric, log_on_batch=False, input_key=input_key, target_key=target_key)
        self.log_curves = log_curves

    def show(self, runner: IRunner, state: Metric) -> None:
        assert isinstance(state, AUCMetric)
        if not self.log_curves or state.num_classes > MAX_CURVES:
            return
        tag = f"{state.prefix}auc{state.suffix}/curves"
        curves = [{name: each.tolist() for name, each in curve.items()} for curve in state.curves()]
        by_class = dict(zip(numbered_classes(len(curves)), curves, strict=True))
        rates = {name: [value for curve in curves for value in curve[name]] for name in curves[0]}
        classes = [name for name, curve in by_class.items() for _ in curve["threshold"]]
        runner.log_table(tag, {"class": classes, **rates})
        log_drawn(runner, tag, lambda: draw_curves(by_class, title=tag))
