"""Train once for each kind of failure, in a process of a job, and record the error that each run ends with.

usage: python -m tests.faults.errors_job FOLDER CASE...
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from runnerkit import dl
from tests.tiny import classification, loader, mlp, train


def is_culprit(runner, rank=1):
    return runner.engine.rank == rank and runner.batch_step == 3


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.num_passes = mlp(), 0

    def forward(self, features):
        self.num_passes += 1
        if self.num_passes == 3 and os.environ["RANK"] == "1":
            raise LookupError("in the model")
        return self.layers(features)


class Spoils(nn.Module):
    """A module that outputs NaN from the third batch on, in rank 1."""

    def __init__(self):
        super().__init__()
        self.num_passes = 0

    def forward(self, x):
        self.num_passes += 1
        return x * float("nan") if self.num_passes >= 3 and os.environ["RANK"] == "1" else x


class Act(dl.Callback):
    """A callback that calls a function in rank 1, in the third step."""

    def __init__(self, act):
        super().__init__(order=dl.CallbackOrder.Metric)
        self.act = act

    def on_batch_end(self, runner):
        if is_culprit(runner):
            self.act(runner)


class Samples(Dataset):
    def __init__(self):
        self.data, self.num_read = classification(64), 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.num_read += 1
        if self.num_read == 10 and os.environ["RANK"] == "1":
            raise LookupError("in the data set")
        return self.data[index]


class Stream:
    """A stream with a given number of batches per rank and without a length."""

    def __init__(self, *counts):
        self.counts, self.num_batches = counts, 0

    def shard(self, *, rank, **_):
        share = type(self)(*self.counts)
        share.num_batches = self.counts[rank]
        return share

    def __iter__(self):
        for _ in range(self.num_batches):
            yield torch.randn(4, 6), torch.randint(0, 3, (4,))


class Sized(Stream):
    def __len__(self):
        return self.num_batches or self.counts[0]  # the length before sharding must not be 0


class Log(dl.ILogger):
    is_essential = True
    log_batch_metrics = True

    def log_scalars(self, scalars, *, step, scope):
        raise LookupError("in the logger")


class OnEnd(dl.Callback):
    def on_epoch_end(self, runner):
        if runner.engine.rank == 1:
            raise LookupError("at the epoch's end")


def fail(runner):
    raise LookupError("in the callback")


def stop(runner):
    runner.need_early_stop = True


def log_another(runner):
    runner.batch_metrics["mine"] = torch.tensor(1.0)


def spoil(runner):
    runner.batch_metrics["loss"] = runner.batch_metrics["loss"] * float("nan")


CASES = {
    "warm up": dict,
    "model": lambda: {"model": Model()},
    "callback": lambda: {"callbacks": [Act(fail)]},
    "logger": lambda: {"loggers": {"console": None, "log": Log()}, "log_every": 1},
    "loader": lambda: {"loaders": {"train": DataLoader(Samples(), batch_size=4)}},
    "epoch end": lambda: {"callbacks": [OnEnd()], "num_epochs": 2},
    "keys": lambda: {"callbacks": [Act(log_another)]},
    "nan": lambda: {"callbacks": [Act(spoil)], "non_finite": "raise"},
    "nan in a module": lambda: {"model": nn.Sequential(mlp(batch_norm=True), Spoils()), "non_finite": "locate"},
    "fewer on rank 1": lambda: {"loaders": {"train": Stream(5, 3)}},
    "fewer on rank 0": lambda: {"loaders": {"train": Stream(3, 5)}},
    "known to be fewer": lambda: {"loaders": {"train": Sized(5, 3)}},
    "no data": lambda: {"loaders": {"train": Stream(3, 0)}},
    "no data to evaluate": lambda: {"loaders": {"train": loader(16, 4), "valid": Stream(3, 0)}},
    "stopped early": lambda: {"callbacks": [Act(stop)]},
    "os._exit": lambda: {"callbacks": [Act(lambda runner: os._exit(7))]},
}


def fit(**options):
    options = {"loaders": {"train": loader(64, 4)}, **options}
    train(**options, engine=dl.DistributedDataParallelEngine(2, device="cpu", timeout_s=60))


def main(folder, *cases):
    told = {}
    for case in cases:
        began, words = time.monotonic(), ""
        try:
            fit(**CASES[case]())
        except Exception as error:
            words = "".join(traceback.format_exception(error))
        told[case] = {"seconds": time.monotonic() - began, "words": words}
        Path(folder, f"{os.environ['RANK']}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
