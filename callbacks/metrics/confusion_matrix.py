"""Confusion matrix, as an image, a table and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runnerkit.callbacks.metrics.parts.figures import draw_matrix, log_drawn
from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics.confusion_matrix import ConfusionMatrixMetric
from runnerkit.metrics.metric import Metric
from runnerkit.support.arguments import check_mappings, check_strings
from runnerkit.types import Metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from runnerkit.runner import IRunner

__all__ = ["ConfusionMatrixCallback"]


class ConfusionMatrixCallback(ObjectMetricCallback):
    """Count the predicted classes of each true class in each loader; log the matrix as an image and as a table.

    The image goes to loggers that accept images, such as TensorBoard's, if Matplotlib is installed; the table, with a
    row for each pair of classes that occurred, to ``tables/confusion_matrix.csv``.

    Args:
        input_key: key of logits (N, C, ...) in ``runner.batch``, or class indices (N, ...); by default the `output_key`
            of the SupervisedRunner.
        target_key: key of class indices (N, ...) int64 in ``runner.batch``; by default the runner's `target_key`.
        prefix: name to log, by default ``confusion_matrix``.
        class_names: names of the C classes; by default ``class_00`` and so on.
        num_classes: C; pass this or `class_names`.
        normalize: draw each row as fractions of its class.
        plot_params: arguments of Matplotlib's ``Figure``.
        threshold: a binary classifier's scores, (N,) or (N, 1) float, above it are class 1; 0 for logits, 0.5 for
            probabilities.
        log_counts: also log the C * C counts as metrics ``confusion_matrix/TRUE_as_PREDICTED``.

    >>> ConfusionMatrixCallback("logits", "targets", class_names=["cat", "dog"], log_counts=True).provides[1]
    'confusion_matrix/cat_as_dog'
    """

    def __init__(
        self,
        input_key: str | None = None,
        target_key: str | None = None,
        prefix: str | None = None,
        class_names: Sequence[str] | None = None,
        num_classes: int | None = None,
        normalize: bool = False,
        plot_params: Mapping[str, Any] | None = None,
        *,
        threshold: float | None = None,
        log_counts: bool = False,
    ) -> None:
        check_strings(self, or_none=True, prefix=prefix)
        check_mappings(self, plot_params=plot_params)
        metric = ConfusionMatrixMetric(num_classes, class_names, threshold=threshold, prefix=prefix)
        super().__init__(metric, log_on_batch=False, input_key=input_key, target_key=target_key)
        self.name, self.class_names = prefix or "confusion_matrix", metric.class_names
        self.normalize, self.plot_params, self.log_counts = normalize, dict(plot_params or {}), log_counts
        self.provides = metric.names if log_counts else ()

    def values(self, state: Metric) -> Metrics:
        if self.log_counts:
            return super().values(state)
        state.compute()  # checks the class indices
        return {}

    def show(self, runner: IRunner, state: Metric) -> None:
        counts: Tensor = state.compute()
        true, predicted = counts.nonzero(as_tuple=True)
        names = self.class_names
        table = {
            "true": [names[each] for each in true.tolist()],
            "predicted": [names[each] for each in predicted.tolist()],
            "count": counts[true, predicted],
        }
        runner.log_table(self.name, table)
        log_drawn(runner, self.name, lambda: self.draw(counts))

    def draw(self, counts: Tensor) -> Figure:
        """Draw (C, C) counts, true classes in rows.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        numbers = counts.cpu().double()
        if self.normalize:
            numbers = numbers / numbers.sum(dim=1, keepdim=True).clamp(min=1)
        return draw_matrix(
            numbers.numpy(),
            names=self.class_names,
            title=self.name,
            is_fraction=self.normalize,
            options=self.plot_params,
        )
