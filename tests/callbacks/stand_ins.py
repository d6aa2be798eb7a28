"""A runner's public attributes without a loop."""

from types import SimpleNamespace
from typing import Any

import torch

from runnerkit.engines import CPUEngine
from runnerkit.fused_reduction import reduce_shares
from runnerkit.metrics import LoaderMeans


def make_runner(**attributes: Any) -> Any:
    """What callbacks may read and write, in the middle of the first epoch's training loader."""
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
        "batch": {},
        "batch_size": 1,
        "batch_metrics": {},
        "loader_metrics": {},
        "_means": LoaderMeans(),
        "epoch_metrics": {},
        "need_early_stop": False,
    }
    return SimpleNamespace(**(defaults | attributes))


def run_loader(callback: Any, runner: Any, batches: list[dict[str, torch.Tensor]]) -> None:
    """Start a loader and run its batches; the end is the test's."""
    callback.on_loader_start(runner)
    for batch in batches:
        runner.batch, runner.batch_size = batch, len(next(iter(batch.values())))
        runner.batch_metrics = {}
        runner.loader_batch_step += 1
        callback.on_batch_end(runner)


def end_loader(callback: Any, runner: Any) -> None:
    """What the runner does at a loader's end; every rank must call."""
    shares = {"callback": callback.share(runner)}
    totals = reduce_shares(shares, processes=runner.engine, loader_key=runner.loader_key)
    callback.take_total(runner, totals["callback"])
