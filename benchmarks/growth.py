"""Case h: the cost of a step with many callbacks or metrics, and of an epoch of 3 batches in runs of many epochs."""

import argparse
import itertools
import json
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Report
from benchmarks.steps import work
from benchmarks.turns import Turns
from runnerkit import dl


class Listener(dl.Callback):
    """A callback that does almost nothing for each batch."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.num_batches = 0

    def on_batch_end(self, runner: Any) -> None:
        self.num_batches += 1


class ManyMetrics(dl.SupervisedRunner):
    """A runner that reports `num_metrics` metrics in addition to the loss."""

    num_metrics = 0

    def handle_batch(self, batch: Any) -> None:
        super().handle_batch(batch)
        mean = self.batch["logits"].detach().mean()
        self.batch_metrics.update({f"metric{number}": mean for number in range(self.num_metrics)})


class EpochClock(dl.Callback):
    """A callback that records when epochs begin, and their losses."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.times: list[float] = []
        self.losses: list[float] = []

    def on_epoch_start(self, runner: Any) -> None:
        self.times.append(time.perf_counter())

    def on_epoch_end(self, runner: Any) -> None:
        self.losses.append(runner.loader_metrics["loss"])


def epoch_us(times: list[float]) -> dict[str, float]:
    """Return the median microseconds per epoch over the first tenth of the epochs and over the last."""
    lengths = [1e6 * (later - earlier) for earlier, later in itertools.pairwise(times)]
    tenth = max(1, len(lengths) // 10)
    return {"first_us": statistics.median(lengths[:tenth]), "last_us": statistics.median(lengths[-tenth:])}


def note_worker(folder: str, worker: int) -> None:
    """Create a file for each worker process that starts."""
    Path(folder, str(os.getpid())).touch()


def three_batches(num_workers: int, folder: str) -> Any:
    """Return prepared batches, or a DataLoader with persistent workers."""
    batches = work.make_batches(3)
    if not num_workers:
        return batches
    features, targets = (torch.cat(each) for each in zip(*batches, strict=True))
    return DataLoader(
        TensorDataset(features, targets),
        batch_size=batches[0][0].shape[0],
        num_workers=num_workers,
        persistent_workers=True,
        worker_init_fn=partial(note_worker, folder),
    )


def raw_steps(batches: work.Batches, num_metrics: int) -> float:
    """Train with a hand-written loop and a separate sum for each metric; return the mean loss."""
    model = work.make_model()
    optimizer, criterion = work.make_optimizer(model), nn.CrossEntropyLoss()
    sums, num_samples = [torch.zeros((), dtype=torch.float64) for _ in range(num_metrics + 1)], 0
    for features, targets in batches:
        optimizer.zero_grad()
        logits = model(features)
        loss = criterion(logits, targets)
        loss.backward()
        optimizer.step()
        mean = logits.detach().mean()
        for total, value in zip(sums, [loss.detach(), *[mean] * num_metrics], strict=True):
            total += value * len(targets)
        num_samples += len(targets)
    return sums[0].item() / num_samples


def raw_epochs(loader: Any, num_epochs: int) -> tuple[list[float], list[float]]:
    """Train with a hand-written loop; return each epoch's start time and mean loss."""
    model = work.make_model()
    optimizer, criterion = work.make_optimizer(model), nn.CrossEntropyLoss()
    times, losses = [], []
    for _ in range(num_epochs):
        times.append(time.perf_counter())
        loss_sum, num_samples = torch.zeros((), dtype=torch.float64), 0
        for features, targets in loader:
            optimizer.zero_grad()
            loss = criterion(model(features), targets)
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(targets)
            num_samples += len(targets)
        losses.append(loss_sum.item() / num_samples)
    return times, losses


def ours(loader: Any, *, callbacks: list[dl.Callback], num_epochs: int = 1, num_metrics: int = 0) -> float:
    """Train with runnerkit; return the last epoch's mean loss."""
    model = work.make_model()
    runner = ManyMetrics()
    runner.num_metrics = num_metrics
    runner.train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=work.make_optimizer(model), loaders={"train": loader},
        callbacks=callbacks, num_epochs=num_epochs, loggers={"console": None}, cpu=True,
    )  # fmt: skip
    return runner.loader_metrics["loss"]


def steps(options: argparse.Namespace) -> Report:
    batches = work.Batches(work.make_batches(2000), Turns())
    if options.who == "raw":
        loss = raw_steps(batches, options.metrics)
    else:
        loss = ours(batches, callbacks=[Listener() for _ in range(options.callbacks)], num_metrics=options.metrics)
    return {"step_us": batches.step_us, "same": {"loss": loss}}


def epochs(options: argparse.Namespace) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        loader = three_batches(options.workers, folder)
        if options.who == "raw":
            times, losses = raw_epochs(loader, options.epochs)
        else:
            clock = EpochClock()
            ours(loader, callbacks=[clock], num_epochs=options.epochs)
            times, losses = clock.times, clock.losses
        # The tenth epoch exists in every variant.
        return {**epoch_us(times), "workers": len(os.listdir(folder)), "same": {"loss": losses[9]}}


def main() -> None:
    """Run the selected variant in raw PyTorch or with runnerkit."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=("raw", "ours"))
    parser.add_argument("--callbacks", type=int, default=0)
    parser.add_argument("--metrics", type=int, default=0)
    parser.add_argument("--epochs", type=int, help="time epochs of 3 batches instead of the steps of one epoch")
    parser.add_argument("--workers", type=int, default=0, help="use a DataLoader with persistent workers")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(steps(options) if options.epochs is None else epochs(options)))


if __name__ == "__main__":
    main()
