"""Metrics that a callback reads and none promises: does the loader have them? Evaluating one batch tells."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch

from runnerkit import components, snapshot
from runnerkit.seeding import keep_rng
from runnerkit.unknown_key import UnknownKeyError

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)


def check_required_metrics(runner: IRunner) -> None:
    """Refuse metrics that no evaluation loader will have.

    Raises:
        KeyError: with the names that there are. Every rank must call: this gathers and reduces.
    """
    if snapshot.is_within_epoch(runner) or not snapshot.is_epoch_left(runner):
        return
    provided = {metric for callback in runner.callbacks.values() for metric in callback.provides}
    for callback in runner.callbacks.values():
        for loader_key, metric_key in callback.requires:
            if metric_key in provided or loader_key.startswith("train"):
                continue
            metrics = _evaluate_one_batch(runner, loader_key)
            if metrics is not None and metric_key not in metrics:
                raise UnknownKeyError(
                    f"{type(callback).__name__} reads metric {metric_key!r} of loader {loader_key!r}, which has "
                    f"{sorted(metrics)}"
                )


def _evaluate_one_batch(runner: IRunner, loader_key: str) -> dict[str, float] | None:
    """Return the metrics; None if any rank raised: what is wrong here will be in training too, and is told there."""
    others = {name: getattr(runner, name) for name in ("loggers", "_early_logs", "epoch_metrics", "model")}
    kept = components.pause_loader(runner) | others
    runner.loggers, runner._early_logs, runner.epoch_metrics = {}, None, {}
    try:
        with keep_rng(), torch.no_grad():
            error = _error_of(partial(_run_one_batch, runner, loader_key))
            if any(runner.engine.gather_object(error is not None)):  # else one would train while others wait for it
                return None
            unreduced = runner.loader_metrics
            error = _error_of(partial(components.finish_loader, runner, loader_key))
            if error is not None and runner.engine.num_processes > 1 and runner.loader_metrics is unreduced:
                raise error  # the others wait in the reduction, and not for this rank to say so
            if any(runner.engine.gather_object(error is not None)):
                return None
        return runner.epoch_metrics[loader_key]
    finally:
        vars(runner).update(kept)


def _run_one_batch(runner: IRunner, loader_key: str) -> None:
    components.setup_loader(runner, loader_key)
    runner._emit("on_loader_start")
    for batch in runner._batches():
        runner._run_batch(batch)
        break


def _error_of(part: Callable[[], None]) -> Exception | None:
    try:
        part()
    except Exception as error:
        logger.debug("one batch could not be evaluated before training: %s", error)
        return error
    return None
