"""A check, before training, that the metrics which callbacks read exist: one batch is evaluated."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from runnerkit.errors import UnknownKeyError, did_you_mean
from runnerkit.loop.checks import check_loader_key
from runnerkit.loop.loader_pass import Pass
from runnerkit.seeding.generators import keep_rng

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


def check_required_metrics(runner: IRunner) -> None:
    """Raise if a callback reads a metric that its evaluation loader will not have; every rank must call.

    Raises:
        KeyError: with the names of the metrics that exist.
    """
    point = runner.current_run.resume_point
    if point.is_within_epoch or not point.is_epoch_left(runner):
        return
    provided = {metric for callback in runner.callbacks.values() for metric in callback.provides}
    requires = [(type(each).__name__, pair) for each in runner.callbacks.values() for pair in each.requires]
    by_callbacks = {pair for _, pair in requires}
    if (monitor := runner.current_run.stage.monitor) is not None:
        reader = f"monitor={monitor.name!r}"
        check_loader_key(monitor.loader, runner.loaders, reader=reader)
        requires += [(reader, monitor.pair)] if monitor.pair not in by_callbacks else []
    for reader, (loader_key, metric_key) in requires:
        if metric_key in provided or loader_key.startswith("train"):
            continue
        metrics = _TrialBatch(runner, loader_key).metrics()
        if metrics is not None and metric_key not in metrics:
            found = f"{reader} reads metric {metric_key!r} of loader {loader_key!r}, which has {sorted(metrics)}"
            raise UnknownKeyError(found + did_you_mean(metric_key, metrics))


class _TrialBatch:
    """One batch of an evaluation loader before training, after which the runner is as before."""

    def __init__(self, runner: IRunner, loader_key: str) -> None:
        self.runner, self.loader_key = runner, loader_key

    def metrics(self) -> dict[str, float] | None:
        """Return its metrics, or None if a rank raised: training will raise the same error, with more context."""
        runner, run, model = self.runner, self.runner.current_run, self.runner.model
        suspended = runner.loader_pass.suspended(runner)
        with suspended, run.position.trial(runner), run.logs.paused(runner), keep_rng(), torch.no_grad():
            metrics = self._evaluated()
        runner.model = model
        return metrics

    def _evaluated(self) -> dict[str, float] | None:
        runner = self.runner
        error = _error_of(self._run)
        if any(runner.engine.gather_object(error is not None)):  # otherwise one rank would train while others wait
            return None
        unreduced = runner.loader_metrics
        error = _error_of(partial(runner.loader_pass.finish, runner))
        if error is not None and runner.engine.num_processes > 1 and runner.loader_metrics is unreduced:
            raise error  # the other ranks wait in the reduction
        if any(runner.engine.gather_object(error is not None)):
            return None
        return runner.epoch_metrics[self.loader_key]

    def _run(self) -> None:
        runner, run = self.runner, self.runner.current_run
        current = Pass.begin(runner, self.loader_key)
        run.emit("on_loader_start", runner)
        for batch in current.batches(runner):
            run.run_batch(runner, batch)
            break


def _error_of(part: Callable[[], None]) -> Exception | None:
    try:
        part()
    except Exception as error:
        logger.debug("one batch could not be evaluated before training: %s", error)
        return error
    return None
