"""Smoothed metrics of a running loader, read from the device only when they are displayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from runnerkit.steps.learning_rates import name_of_rate
from runnerkit.support.host_copy import read_metrics_at_once
from runnerkit.types import Metrics, Scalar, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

T = TypeVar("T")

_PAST = 0.98  # weight of earlier batches: means cover about fifty


class LiveMetrics:
    """Exponential means of one process's pass over a loader, and the learning rate.

    A batch costs nothing: the increase of the runner's sums over the loader since the last reading gives the mean of
    the batches in between. Metrics without a sum in the runner (their callback keeps one) show the latest batch.
    """

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, float]] = {}
        self._num_batches = 0  # included in the totals
        self._means: dict[str, tuple[float, float]] = {}  # sum of weighted values, and of weights

    def read(self, runner: IRunner) -> Metrics:
        """Return current values at a batch's end, without names that start with "_"; synchronizes with the device."""
        totals = shown(runner.loader_pass.means.totals())
        num_batches = runner.loader_batch_step - 1  # the latest batch is added after all callbacks
        past = _PAST ** (num_batches - self._num_batches)
        for name, (total, count) in totals.items():
            before, count_before = self._totals.get(name, (0.0, 0))
            if count > count_before:
                mean, weight = self._means.get(name, (0.0, 0.0))
                value = (total - before) / (count - count_before)
                self._means[name] = past * mean + (1 - past) * value, past * weight + (1 - past)
        self._totals, self._num_batches = totals, num_batches
        means = {name: mean / weight for name, (mean, weight) in self._means.items()}
        rest = {name: value for name, value in shown(runner.batch_metrics).items() if name not in means}
        [latest] = read_metrics_at_once([{**rest, **_rates(runner), **rest}])
        return means | latest


def shown(values: Mapping[str, T]) -> dict[str, T]:
    """Remove names that start with "_".

    >>> shown({"loss": 0.5, "_timer/_fps": 100.0})
    {'loss': 0.5}
    """
    return {name: value for name, value in values.items() if not name.startswith("_")}


def _rates(runner: IRunner) -> dict[str, Scalar]:
    """Return the learning rates of the next step, by the names that OptimizerCallback logs."""
    optimizers = as_dict(runner.optimizer) if runner.is_train_loader else {}
    factors = runner.current_run.stage.rate_factors
    return {name_of_rate(key): each.param_groups[0]["lr"] * factors.get(key, 1.0) for key, each in optimizers.items()}
