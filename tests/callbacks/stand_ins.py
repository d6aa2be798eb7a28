"""A stand-in with a runner's public attributes and no loop."""

from types import SimpleNamespace
from typing import Any

import torch

from runnerkit.engines import CPUEngine
from runnerkit.loop.loader_run import LoaderRun
from runnerkit.metrics.means import LoaderMeans
from runnerkit.metrics.reduction import reduce_sums


def make_runner(*, means: LoaderMeans | None = None, **attributes: Any) -> Any:
    """Return the attributes that callbacks read and write, as in the first epoch's training loader.

    Args:
        means: sums of the batches that ran; by default there are none.
    """
    loader_run = LoaderRun()
    loader_run.means = means or loader_run.means
    defaults = {
        "engine": CPUEngine(),
        "optimizer": None,
        "stage_key": "train",
        "loader_key": "train",
        "is_train_loader": True,
        "epoch_step": 1,
        "stage_epoch_step": 1,
        "stage_epoch_len": 3,
        "loader_batch_step": 0,
        "loader_batch_len": None,
        "loaders": {},
        "loggers": {},
        "batch": {},
        "batch_size": 1,
        "batch_weight": None,
        "batch_metrics": {},
        "loader_metrics": {},
        "_loader_run": loader_run,
        "epoch_metrics": {},
        "need_early_stop": False,
    }
    return SimpleNamespace(**(defaults | attributes))


def run_loader(callback: Any, runner: Any, batches: list[dict[str, torch.Tensor]]) -> None:
    """Start a loader and run its batches; the test ends the loader."""
    callback.on_loader_start(runner)
    for batch in batches:
        runner.batch, runner.batch_size = batch, len(next(iter(batch.values())))
        runner.batch_metrics = {}
        runner.loader_batch_step += 1
        callback.on_batch_end(runner)


def end_loader(callback: Any, runner: Any) -> None:
    """End a loader as the runner does; every rank must call this."""
    shares = {"callback": callback.share(runner)}
    totals = reduce_sums(shares, processes=runner.engine, loader_key=runner.loader_key)
    callback.take_total(runner, totals["callback"])
