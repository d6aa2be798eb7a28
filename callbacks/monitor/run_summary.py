"""A summary at the end of a run: metrics, duration and logs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from tqdm import tqdm

from runnerkit.callback import Callback, CallbackNode, CallbackOrder, innermost
from runnerkit.callbacks.checkpoint import CheckpointCallback
from runnerkit.storage.remote.urls import shown
from runnerkit.support.text_table import text_table
from runnerkit.types import Metrics

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["RunSummaryCallback"]

Values: TypeAlias = dict[str, dict[str, dict[int, float]]]  # {loader: {metric: {epoch: value}}}


class RunSummaryCallback(Callback):
    """Log a table as text at the end of the run: the last, smallest and largest value of each loader's metrics, the
    best value of the metric that selects checkpoints, the duration and the logdir.

    Values are those of whole epochs, including epochs before a resume; names that start with "_" are left out.

    >>> RunSummaryCallback().node
    <CallbackNode.Master: 1>
    """

    shapes_training = True  # not for evaluations

    def __init__(self) -> None:
        super().__init__(order=CallbackOrder.External, node=CallbackNode.Master)
        self._started_at = 0.0

    def on_experiment_start(self, runner: IRunner) -> None:
        self._started_at = time.monotonic()

    def on_experiment_end(self, runner: IRunner) -> None:
        values = _by_loader(runner.experiment_metrics)
        duration = tqdm.format_interval(time.monotonic() - self._started_at)
        logdirs = sorted({shown(logger.logdir) for logger in runner.loggers.values() if logger.logdir is not None})
        lines = [_table(values), *_best(runner, values)]
        lines.append(f"epoch {runner.epoch_step}, step {runner.batch_step}, in {duration}")
        lines += [f"logs in {each}" for each in logdirs]
        runner.log_text("summary", "\n".join(lines))


def _by_loader(epochs: dict[int, dict[str, Metrics]]) -> Values:
    values: Values = {}
    for epoch, loaders in epochs.items():
        for loader, metrics in loaders.items():
            for metric, value in metrics.items():
                if not metric.startswith("_"):
                    values.setdefault(loader, {}).setdefault(metric, {})[epoch] = value
    return values


def _table(values: Values) -> str:
    rows = [("loader", "metric", "last", "min", "epoch", "max", "epoch")]
    for loader, metrics in values.items():
        for metric, by_epoch in metrics.items():
            last = f"{[*by_epoch.values()][-1]:.4g}"
            rows.append((loader, metric, last, *_extreme(by_epoch, min), *_extreme(by_epoch, max)))
    return text_table(rows, align="<<>>>>>")


def _extreme(by_epoch: dict[int, float], choose: Callable[..., int]) -> tuple[str, str]:
    """Find the smallest or largest value and its first epoch, ignoring NaN."""
    known = {epoch: value for epoch, value in by_epoch.items() if not math.isnan(value)}
    if not known:
        return "-", "-"
    epoch = choose(known, key=known.__getitem__)
    return f"{known[epoch]:.4g}", str(epoch)


def _best(runner: IRunner, values: Values) -> Iterator[str]:
    """Yield the best values of metrics that select checkpoints; for others, the better direction is unknown."""
    for each in map(innermost, runner.callbacks.values()):
        if isinstance(each, CheckpointCallback) and each.monitor is not None:
            loader, metric = each.monitor.pair
            by_epoch = values.get(loader, {}).get(metric, {})
            value, epoch = _extreme(by_epoch, min if each.monitor.minimize else max)
            if by_epoch:
                yield f"best {metric} of {loader}: {value}, epoch {epoch}"
