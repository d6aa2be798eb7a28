"""The metrics of a loader that is over: those of its batches and those of all callbacks, in one reduction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from runnerkit.callback import IMetricCallback, innermost
from runnerkit.fused_reduction import Share, Shares, reduce_shares
from runnerkit.metrics import means_of
from runnerkit.non_finite import describe

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


def reduce_metrics(runner: IRunner) -> int:
    """Fill ``runner.loader_metrics``; every rank must call, also one that saw no batch: this reduces.

    Returns:
        The number of samples that all processes saw.
    Raises:
        ValueError: processes have different metrics.
        FloatingPointError: a metric was not finite, and ``runner.non_finite`` is "raise"; on every rank.
    """
    callbacks = ((key, innermost(each)) for key, each in runner.callbacks.items())
    metrics = {f"callback {key!r}": each for key, each in callbacks if isinstance(each, IMetricCallback)}
    first = runner._means.first_non_finite
    place = first.find(rank=runner.engine.rank) if first is not None else None
    shares: Shares = {
        "num_samples": Share({"": torch.tensor(runner._means.num_samples)}),
        "num_non_finite": Share({"": torch.tensor(int(place is not None))}),
        "batch_metrics": runner._means.share(),
        **{owner: each.share(runner) for owner, each in metrics.items()},
    }
    totals = reduce_shares(shares, processes=runner.engine, loader_key=runner.loader_key)
    if _number(totals["num_non_finite"]):
        places = runner.engine.gather_object(place)
        raise FloatingPointError(describe(places, loader_key=runner.loader_key, epoch=runner.epoch_step))
    runner.loader_metrics = {**means_of(totals["batch_metrics"]), **runner.loader_metrics}
    for owner, each in metrics.items():
        each.take_total(runner, totals[owner])
    return _number(totals["num_samples"])


def _number(total: Share | None) -> int:
    assert total is not None
    return int(total.sums[""])
