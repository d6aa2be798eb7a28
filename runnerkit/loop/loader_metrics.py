"""The metrics of a pass over a loader: batch metrics and callbacks' metrics are reduced over processes together."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING

import torch

from runnerkit.callback import CallbackNode, IBackwardCallback, IMetricCallback, IOptimizerCallback, innermost
from runnerkit.metrics.first_non_finite import FirstNonFinite, describe_first
from runnerkit.metrics.means import LoaderMeans, means_of
from runnerkit.metrics.reduction import PartialSums, SumsByOwner, reduce_sums
from runnerkit.metrics.renamed import NamedMetrics
from runnerkit.resume.run_weights import RunWeights
from runnerkit.steps.diverged import advice

if TYPE_CHECKING:
    from runnerkit.callback import IRunner


class LoaderMetrics:
    """The metrics of one pass: sums in this process, then ``runner.loader_metrics`` over all processes.

    Attributes:
        means: the batch metrics of this process, kept as weighted sums until the loader ends.
        weightless: metrics that are NaN because no batch weighs anything.
    """

    def __init__(self) -> None:
        self.means = LoaderMeans()
        self.weightless: frozenset[str] = frozenset()

    def begin(self, runner: IRunner) -> None:
        """Start with empty sums, without the metrics that callbacks compute from their own."""
        runner.loader_metrics = NamedMetrics()
        if runner.non_finite == "raise":
            self.means = LoaderMeans(first_non_finite=FirstNonFinite())  # checks every value
            return
        callbacks = self._callbacks(runner).values()
        totals = [each.provides for each in callbacks if each is not None and each.totals_all]
        self.means = LoaderMeans(left_out=frozenset(chain.from_iterable(totals)))

    def reduce(self, runner: IRunner) -> int:
        """Fill ``runner.loader_metrics``; every rank must call, even one that saw no batch, because this reduces.

        Returns:
            The number of samples that all processes saw.
        Raises:
            ValueError: processes have different metrics.
            FloatingPointError: a metric was not finite, and ``runner.non_finite`` is "raise"; on every rank.
        """
        engine, callbacks = runner.engine, self._callbacks(runner)
        first = self.means.first_non_finite
        place = first.find(rank=engine.rank) if first is not None else None
        parts: SumsByOwner = {
            "num_samples": PartialSums({"": torch.tensor(self.means.num_samples)}),
            "num_non_finite": PartialSums({"": torch.tensor(int(place is not None))}),
            "batch_metrics": self.means.share(),
            **{owner: each.share(runner) if each is not None else None for owner, each in callbacks.items()},
        }
        totals = reduce_sums(parts, processes=engine.data_parallel, loader_key=runner.loader_key)
        if _number(totals["num_non_finite"]):
            places = engine.gather_object(place)
            raise FloatingPointError(describe_first(places, loader_key=runner.loader_key, epoch=runner.epoch_step))
        batch_metrics = totals["batch_metrics"]
        runner.loader_metrics = NamedMetrics({**means_of(batch_metrics), **runner.loader_metrics})
        sums = batch_metrics.sums if batch_metrics is not None else {}
        self.weightless = frozenset(key for key, (_, weight) in sums.items() if not weight)
        for owner, each in callbacks.items():
            if each is not None:
                each.take_total(runner, totals[owner])
                _check_totals(each, runner.batch_metrics.keys() - runner.loader_metrics.keys())
        return _number(totals["num_samples"])

    def check(self, runner: IRunner) -> None:
        """Raise if a training loader has made the loss NaN, or any metric and the weights; every rank must call.

        A BackwardCallback checks its own loss. Without one, the loss is that of an OptimizerCallback, or "loss".
        """
        callbacks = [innermost(each) for each in runner.callbacks.values()]
        if any(isinstance(each, IBackwardCallback) for each in callbacks):
            return
        losses = [each.metric_key for each in callbacks if isinstance(each, IOptimizerCallback)]
        for key in losses or (["loss"] if runner.optimizer is not None else []):
            self.check_mean(runner, key)
        bad = next((key for key, value in runner.loader_metrics.items() if self._is_bad(runner, key, value)), None)
        # The means are the same on all ranks, so that all enter: this gathers.
        if bad is not None and any(runner.engine.gather_object(RunWeights(runner).spoiled_part())):
            self.check_mean(runner, bad)

    def check_mean(self, runner: IRunner, key: str) -> None:
        """Raise if the mean of a loss over a training loader is not a number, or infinite without a gradient scaler.

        Raises:
            ValueError: with the key, the epoch and the loader.
        """
        mean = runner.loader_metrics.get(key)
        if mean is not None and self._is_bad(runner, key, mean):
            place = f"epoch {runner.epoch_step} of loader {runner.loader_key!r}"
            end = advice(runner.callbacks, gradient_clip=runner.gradient_clip)
            raise ValueError(f"{key!r} became {mean} within {place}{end}")

    def _is_bad(self, runner: IRunner, key: str, mean: float) -> bool:
        if key in self.weightless:
            return False
        return math.isnan(mean) or (math.isinf(mean) and not runner.engine.precision.skips_steps)

    def _callbacks(self, runner: IRunner) -> dict[str, IMetricCallback | None]:
        """Return the callbacks that compute metrics, by owner; None for one that does not act on this pass here."""
        found: dict[str, IMetricCallback | None] = {}
        for key, callback in runner.callbacks.items():
            inner = innermost(callback)
            if isinstance(inner, IMetricCallback):
                acts = CallbackNode(callback.node).includes(runner.engine.rank) and callback.acts_in_loader(runner)
                found[f"callback {key!r}"] = inner if acts else None
        return found


def _check_totals(callback: IMetricCallback, unreduced: Collection[str]) -> None:
    lost = set(callback.provides).intersection(unreduced)
    if callback.totals_all and lost:
        raise RuntimeError(
            f"{type(callback).__name__} left {sorted(lost)} in runner.batch_metrics and summed nothing: call "
            "super().on_batch_end(runner) in its on_batch_end, or set totals_all = False to let the runner average it"
        )


def _number(total: PartialSums | None) -> int:
    assert total is not None
    return int(total.sums[""])
