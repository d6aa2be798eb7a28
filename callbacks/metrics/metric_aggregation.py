"""Aggregation of metrics into one, such as a total loss or a mean score."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from runnerkit.callback import CallbackOrder, IMetricCallback
from runnerkit.errors import UnknownKeyError
from runnerkit.metrics.renamed import current_name
from runnerkit.support.arguments import check_numbers, check_strings
from runnerkit.support.deprecation import Renamed, accepts_old_names
from runnerkit.types import Scalar

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["MetricAggregationCallback"]

Aggregation = Callable[[dict[str, Scalar]], Scalar]
Reduction = Literal["sum", "mean", "weighted_sum", "weighted_mean"]


class MetricAggregationCallback(IMetricCallback):
    """Log a sum, a mean or any function of metrics; gradients flow through it, so the result may be the loss.

    Args:
        metric_key: name to log.
        metrics: names to aggregate, or {name: weight} for the weighted ones; None is all metrics.
        reduction: "sum", "mean", "weighted_sum", "weighted_mean" (divided by the sum of weights), or a function of
            {name: value}.
        scope: "batch" aggregates ``batch_metrics`` of each batch, "loader" the ``loader_metrics``.
        multiplier: factor applied to the result.

    >>> MetricAggregationCallback("loss", {"loss_a": 1.0, "loss_b": 0.5}, reduction="weighted_sum").provides
    ('loss',)
    """

    counts_samples = False

    @accepts_old_names(Renamed("mode", "reduction"))
    def __init__(
        self,
        metric_key: str,
        metrics: Sequence[str] | Mapping[str, float] | None = None,
        reduction: Reduction | Aggregation = "mean",
        scope: Literal["batch", "loader"] = "batch",
        multiplier: float = 1.0,
    ) -> None:
        super().__init__(order=CallbackOrder.MetricAggregation)
        check_strings(self, metric_key=metric_key)
        check_numbers(self, multiplier=multiplier)
        if metrics is not None and (isinstance(metrics, str) or not isinstance(metrics, Iterable)):
            raise TypeError(
                f"{type(self).__name__}: metrics must be a list of names or {{name: weight}}, got {metrics!r}"
            )
        if metrics is not None and not metrics:
            raise ValueError("MetricAggregationCallback: metrics is empty; name at least one, or pass None for all")
        if scope not in ("batch", "loader"):
            raise ValueError(f"{type(self).__name__}: scope must be 'batch' or 'loader', got {scope!r}")
        self.metric_key = metric_key
        self.metrics = None if metrics is None else tuple(metrics)
        self.scope = scope
        self.multiplier = multiplier
        self.provides = (metric_key,)
        self._aggregate = reduction if callable(reduction) else _aggregation(reduction, metrics)

    def on_batch_end(self, runner: IRunner) -> None:
        names = {*(self.metrics or runner.batch_metrics.keys() - {self.metric_key})}
        # On a process without a sample, other metrics are not computed.
        is_idle = runner.gradient_step.is_idle and not (names and names <= runner.batch_metrics.keys())
        if self.scope == "batch" and not is_idle:
            runner.batch_metrics[self.metric_key] = self._value(runner.batch_metrics, "batch_metrics")

    def on_loader_end(self, runner: IRunner) -> None:
        if self.scope == "loader":
            runner.loader_metrics[self.metric_key] = float(self._value(runner.loader_metrics, "loader_metrics"))

    def _value(self, metrics: Mapping[str, Scalar], where: str) -> Scalar:
        names = [name for name in metrics if name != self.metric_key] if self.metrics is None else self.metrics
        today = {name: name if name in metrics else current_name(name, metrics) for name in names}
        missing = [name for name, key in today.items() if key not in metrics]
        if missing or not names:
            raise UnknownKeyError(
                f"{type(self).__name__} computes {self.metric_key!r} from {missing or 'all metrics'}; "
                f"{where} has {sorted(metrics)}"
            )
        return self._aggregate({name: metrics[key] for name, key in today.items()}) * self.multiplier


def _aggregation(reduction: str, metrics: Sequence[str] | Mapping[str, float] | None) -> Aggregation:
    weights = dict(metrics) if isinstance(metrics, Mapping) else None
    if reduction in ("sum", "mean"):
        if weights is not None:
            raise ValueError(
                f"reduction {reduction!r} does not use weights; pass a list of names, or "
                f"reduction='weighted_{reduction}'"
            )
        return _sum if reduction == "sum" else _mean
    if reduction not in ("weighted_sum", "weighted_mean"):
        raise ValueError(f"reduction must be sum, mean, weighted_sum, weighted_mean or a function, got {reduction!r}")
    if weights is None:
        raise ValueError(f"reduction {reduction!r} needs metrics={{name: weight}}, got {metrics!r}")
    total = 1.0 if reduction == "weighted_sum" else sum(weights.values())
    if total == 0:
        raise ValueError(f"reduction 'weighted_mean' needs weights whose sum is not 0, got {weights}")
    return lambda values: sum(value * weights[name] for name, value in values.items()) / total


def _sum(values: dict[str, Scalar]) -> Scalar:
    return sum(values.values())


def _mean(values: dict[str, Scalar]) -> Scalar:
    return sum(values.values()) / len(values)
