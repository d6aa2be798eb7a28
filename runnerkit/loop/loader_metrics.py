"""The reduction of a loader's metrics over processes: batch metrics and callbacks' metrics together."""

from __future__ import annotations

import math
from itertools import chain
from typing import TYPE_CHECKING

import torch

from runnerkit.callback import CallbackNode, IBackwardCallback, IMetricCallback, IOptimizerCallback, innermost
from runnerkit.metrics.first_non_finite import FirstNonFinite, describe_first
from runnerkit.metrics.means import LoaderMeans, means_of
from runnerkit.metrics.reduction import PartialSums, SumsByOwner, reduce_sums
from runnerkit.models.finite import non_finite_part
from runnerkit.resume.run_state import modules_of
from runnerkit.steps.diverged import advice

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


def new_means(runner: IRunner) -> LoaderMeans:
    """Return empty means for a loader, without the metrics that callbacks compute from their own sums."""
    if runner.non_finite == "raise":
        return LoaderMeans(first_non_finite=FirstNonFinite())  # checks every value
    totals = [each.provides for each in _metric_callbacks(runner).values() if each is not None and each.totals_all]
    return LoaderMeans(left_out=frozenset(chain.from_iterable(totals)))


def reduce_metrics(runner: IRunner) -> int:
    """Fill ``runner.loader_metrics``; every rank must call, even one that saw no batch, because this reduces.

    Returns:
        The number of samples that all processes saw.
    Raises:
        ValueError: processes have different metrics.
        FloatingPointError: a metric was not finite, and ``runner.non_finite`` is "raise"; on every rank.
    """
    metrics = _metric_callbacks(runner)
    first = runner.loader_pass.means.first_non_finite
    place = first.find(rank=runner.engine.rank) if first is not None else None
    parts: SumsByOwner = {
        "num_samples": PartialSums({"": torch.tensor(runner.loader_pass.means.num_samples)}),
        "num_non_finite": PartialSums({"": torch.tensor(int(place is not None))}),
        "batch_metrics": runner.loader_pass.means.share(),
        **{owner: each.share(runner) if each is not None else None for owner, each in metrics.items()},
    }
    totals = reduce_sums(parts, processes=runner.engine.data_parallel, loader_key=runner.loader_key)
    if _number(totals["num_non_finite"]):
        places = runner.engine.gather_object(place)
        raise FloatingPointError(describe_first(places, loader_key=runner.loader_key, epoch=runner.epoch_step))
    batch_metrics = totals["batch_metrics"]
    runner.loader_metrics = {**means_of(batch_metrics), **runner.loader_metrics}
    sums = batch_metrics.sums if batch_metrics is not None else {}
    runner.loader_pass.weightless = frozenset(key for key, (_, weight) in sums.items() if not weight)
    for owner, each in metrics.items():
        if each is not None:
            each.take_total(runner, totals[owner])
            _check_totals(runner, each)
    return _number(totals["num_samples"])


def check_means(runner: IRunner) -> None:
    """Raise if a training loader has made the loss NaN, or any metric and the weights; every rank must call.

    A BackwardCallback checks its own loss. Without one, the loss is that of an OptimizerCallback, or "loss".
    """
    callbacks = [innermost(each) for each in runner.callbacks.values()]
    if any(isinstance(each, IBackwardCallback) for each in callbacks):
        return
    losses = [each.metric_key for each in callbacks if isinstance(each, IOptimizerCallback)]
    for key in losses or (["loss"] if runner.optimizer is not None else []):
        check_mean(runner, key)
    bad = next((key for key, value in runner.loader_metrics.items() if _is_bad(runner, key, value)), None)
    # The means are the same on all ranks, so that all enter: this gathers.
    if bad is not None and any(runner.engine.gather_object(non_finite_part(modules_of(runner)))):
        check_mean(runner, bad)


def check_mean(runner: IRunner, key: str) -> None:
    """Raise if the mean of a loss over a training loader is not a number, or infinite without a gradient scaler.

    Raises:
        ValueError: with the key, the epoch and the loader.
    """
    mean = runner.loader_metrics.get(key)
    if mean is not None and _is_bad(runner, key, mean):
        raise ValueError(
            f"{key!r} became {mean} within epoch {runner.epoch_step} of loader {runner.loader_key!r}{advice(runner)}"
        )


def _is_bad(runner: IRunner, key: str, mean: float) -> bool:
    if key in runner.loader_pass.weightless:
        return False
    return math.isnan(mean) or (math.isinf(mean) and not runner.engine.precision.skips_steps)


def _check_totals(runner: IRunner, callback: IMetricCallback) -> None:
    lost = set(callback.provides) & runner.batch_metrics.keys() - runner.loader_metrics.keys()
    if callback.totals_all and lost:
        raise RuntimeError(
            f"{type(callback).__name__} left {sorted(lost)} in runner.batch_metrics and summed nothing: call "
            "super().on_batch_end(runner) in its on_batch_end, or set totals_all = False to let the runner average it"
        )


def _metric_callbacks(runner: IRunner) -> dict[str, IMetricCallback | None]:
    """Return the metric callbacks by owner; None for one that acts in other processes only."""
    metrics: dict[str, IMetricCallback | None] = {}
    for key, callback in runner.callbacks.items():
        inner = innermost(callback)
        if isinstance(inner, IMetricCallback):
            acts = CallbackNode(callback.node).includes(runner.engine.rank) and callback.acts_in_loader(runner)
            metrics[f"callback {key!r}"] = inner if acts else None
    return metrics


def _number(total: PartialSums | None) -> int:
    assert total is not None
    return int(total.sums[""])
