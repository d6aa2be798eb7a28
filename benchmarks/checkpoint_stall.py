"""Case e: delay of a step that saves a checkpoint of 34 million weights with Adam's state."""

import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.storage.remote.manifest import FILE
from tests.server_process import serving
from tests.storage.s3_server import Bucket, environment

NUM_STEPS, BATCH_SIZE, SAVE_EVERY = 65, 8, 32
NUM_LAYERS = 8


class Clock(dl.Callback):
    """A callback that records when each step begins."""

    def __init__(self) -> None:
        super().__init__(order=dl.CallbackOrder.Internal)
        self.times: list[float] = []

    def on_batch_start(self, runner: Any) -> None:
        self.times.append(time.perf_counter())


def stall_ms(times: list[float]) -> float:
    """Return the median time of steps that save minus that of the others, without the first step, a warm-up."""
    steps = {number: after - before for number, (before, after) in enumerate(itertools.pairwise(times), start=1)}
    saving = [seconds for number, seconds in steps.items() if number % SAVE_EVERY == 0]
    others = [seconds for number, seconds in steps.items() if number % SAVE_EVERY and number > 1]
    return 1000 * (statistics.median(saving) - statistics.median(others))


def make_loader() -> DataLoader[Any]:
    torch.manual_seed(0)
    num_samples = NUM_STEPS * BATCH_SIZE
    return DataLoader(
        TensorDataset(torch.randn(num_samples, 2048), torch.randint(0, 10, (num_samples,))), batch_size=BATCH_SIZE
    )


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(NUM_LAYERS)), nn.Linear(2048, 10))


def raw(folder: Path) -> tuple[list[float], float]:
    """Save to a temporary file, sync it, then rename it, so that a crash leaves the previous file intact."""
    model, times = make_model(), []
    optimizer, criterion, loss_sum = torch.optim.Adam(model.parameters(), lr=1e-4), nn.CrossEntropyLoss(), 0.0
    for step, (features, targets) in enumerate(make_loader(), start=1):
        times.append(time.perf_counter())
        optimizer.zero_grad()
        loss = criterion(model(features), targets)
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
        if step % SAVE_EVERY == 0:
            with (folder / "beside").open("wb") as file:
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
                os.fsync(file.fileno())
            os.replace(folder / "beside", folder / "last.pth")
    return times, loss_sum / NUM_STEPS


def ours(folder: Path | str, *, asynchronous: bool = False) -> tuple[list[float], float]:
    """Save with the callback, in the step or in a thread, to a folder or a URL."""
    checkpoint = dl.CheckpointCallback(folder, content="runner", every_steps=SAVE_EVERY, asynchronous=asynchronous)
    model, clock = make_model(), Clock()
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-4),
        loaders={"train": make_loader()},
        callbacks=[clock, checkpoint],
        loggers={"console": None},
        cpu=True,
    )
    return clock.times, runner.epoch_metrics["train"]["loss"]


def stored(folder: Path) -> tuple[list[float], float]:
    """Save in a thread to an S3 server on this machine, which gets less of the processor."""
    with serving("tests.storage.s3_server", is_nice=True) as url:
        os.environ |= {**environment(url), "RUNNERKIT_STAGING": str(folder)}
        bucket = Bucket.create("benchmark", url)
        result = ours(bucket.url(), asynchronous=True)
        assert f"run/{FILE}" in bucket.names()
    return result


CANDIDATES = {"raw": raw, "sync": ours, "async": partial(ours, asynchronous=True), "store": stored}


def main() -> None:
    """Train and save with a hand-written loop or with runnerkit."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        times, loss = CANDIDATES[sys.argv[1]](Path(folder))
    print(json.dumps({"stall_ms": stall_ms(times), "same": {"loss": loss}}))


if __name__ == "__main__":
    main()
