"""Metrics of a loader under way, to look at: smoothed, and read from the device only when they are shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar

from runnerkit.host_copy import read_metrics_at_once
from runnerkit.types import Metrics, Scalar, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

T = TypeVar("T")

_PAST = 0.98  # weight of the past after one batch: means are over some fifty


class LiveMetrics:
    """Exponential means of one process's pass over a loader, and the learning rate.

    A batch costs nothing: by what the runner's sums over the loader have grown since the last reading they tell the
    mean of the batches in between. Of a metric that has no sum (its callback keeps one) the latest batch is taken.
    """

    def __init__(self) -> None:
        self._totals: dict[str, tuple[float, int]] = {}
        self._num_batches = 0  # in the totals
        self._means: dict[str, tuple[float, float]] = {}  # sums of weighted values, and of their weights

    def read(self, runner: IRunner) -> Metrics:
        """Take what there is at a batch's end; waits for the device. Names that begin with "_" are left out."""
        totals = shown(runner._means.totals())
        num_batches = runner.loader_batch_step - 1  # the latest is added after all callbacks
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
        [latest] = read_metrics_at_once([{**rest, **_rates(runner)}])
        return means | latest


def shown(values: Mapping[str, T]) -> dict[str, T]:
    """Leave out names that begin with "_".

    >>> shown({"loss": 0.5, "_timer/_fps": 100.0})
    {'loss': 0.5}
    """
    return {name: value for name, value in values.items() if not name.startswith("_")}


def _rates(runner: IRunner) -> dict[str, Scalar]:
    """Return what the next step is taken with, by the names under which OptimizerCallback logs it."""
    optimizers = as_dict(runner.optimizer) if runner.is_train_loader else {}
    return {f"lr_{key}" if key else "lr": each.param_groups[0]["lr"] for key, each in optimizers.items()}
