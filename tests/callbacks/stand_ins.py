"""A stand-in with a runner's public attributes and no loop."""

import copy
import io
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from runnerkit.engines import CPUEngine
from runnerkit.loop.loader_pass import Pass
from runnerkit.loop.run import Run
from runnerkit.metrics.means import LoaderMeans
from runnerkit.metrics.reduction import reduce_sums
from tests.ranks import Ranks


class Clock:
    """A replacement for a module's `time` that advances only when `now` is changed."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    perf_counter = monotonic

    def pause(self, seconds: float) -> None:
        self.now += seconds


def make_runner(*, means: LoaderMeans | None = None, **attributes: Any) -> Any:
    """Return the attributes that callbacks read and write, as in the first epoch's training loader.

    Args:
        means: sums of the batches that ran; by default there are none.
    """
    loader_pass = Pass()
    loader_pass.metrics.means = means or loader_pass.means
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
        "current_run": Run(),
        "loader_pass": loader_pass,
        "gradient_step": loader_pass.gradient_step,
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


def evaluate(callback: Any, batches: list[dict[str, torch.Tensor]], **attributes: Any) -> Any:
    """Run a loader from its start to its end; return the runner."""
    runner = make_runner(**attributes)
    run_loader(callback, runner, batches)
    end_loader(callback, runner)
    return runner


def evaluate_on_ranks(callback: Any, shares: list[list[dict[str, torch.Tensor]]]) -> tuple[list[Any], int]:
    """Run a copy of the callback on each rank's batches; return the runners and the number of collectives."""
    ranks = Ranks(len(shares))
    pairs = [(copy.deepcopy(callback), make_runner(engine=engine)) for engine in ranks.engines]
    for pair, batches in zip(pairs, shares, strict=True):
        run_loader(*pair, batches)
    ranks.call(*(partial(end_loader, *pair) for pair in pairs))
    return [runner for _, runner in pairs], ranks.num_collectives


def resume_on_ranks(callback: Any, shares: list[Any], rest: list[Any], *, num_resumed: int) -> list[Any]:
    """Save the state after each rank's batches, and resume on other ranks, the first of which runs the rest."""
    saving, resuming, file = Ranks(len(shares)), Ranks(num_resumed), io.BytesIO()
    saved = [copy.deepcopy(callback) for _ in shares]
    for each, engine, batches in zip(saved, saving.engines, shares, strict=True):
        run_loader(each, make_runner(engine=engine), batches)
    torch.save(saving.call(*(each.state_dict for each in saved))[0], file)
    pairs = [(copy.deepcopy(callback), make_runner(engine=each, loader_batch_step=1)) for each in resuming.engines]
    for rank, (each, runner) in enumerate(pairs):
        file.seek(0)
        each.on_stage_start(runner)
        each.load_state_dict(torch.load(file, weights_only=True))
        run_loader(each, runner, [] if rank else rest)
    resuming.call(*(partial(end_loader, *pair) for pair in pairs))
    assert all(each.state_dict() == {} for each, _ in pairs)
    return [runner for _, runner in pairs]
