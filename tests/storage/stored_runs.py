"""Short runs whose logdir is in a store, and what they leave there."""

import json
from pathlib import Path
from typing import Any

import torch

from runnerkit import dl
from runnerkit.storage.remote.store import Store
from tests import tiny
from tests.tiny import loader, mlp, sgd

NUM_STEPS = 4  # of an epoch


def train(logdir: str | Path, *callbacks: dl.Callback, num_epochs: int = 2, **options: Any) -> Any:
    """Train with dropout, shuffling and all loggers that write files."""
    torch.manual_seed(0)
    model = mlp(dropout=0.3)
    loggers = {
        "csv": dl.CSVLogger(logdir, log_batch_metrics=True), "jsonl": dl.JSONLLogger(logdir, log_batch_metrics=True),
        "tensorboard": dl.TensorboardLogger(logdir, log_batch_metrics=True),
    }  # fmt: skip
    options = {"resume": "auto", "log_every": 1, "loggers": loggers, **options}
    loaders = {"train": loader(16, 4, shuffle=True), "valid": loader(9, 4)}
    return tiny.train(
        model, optimizer=sgd(model, lr=0.05), loaders=loaders, callbacks=callbacks, num_epochs=num_epochs,
        logdir=logdir, **options,
    )  # fmt: skip


def saving(logdir: str | Path, **options: Any) -> dl.CheckpointCallback:
    """Return a callback that saves at every second step."""
    arguments = {"content": "runner", "every_steps": 2, "mode": "min", **options}
    return dl.CheckpointCallback(logdir, monitor="valid/loss", **arguments)


class At(dl.Callback):
    """A callback that calls a function after one training step, or after each."""

    def __init__(self, act: Any, *, step: int | None = None) -> None:
        super().__init__(dl.CallbackOrder.External)
        self._act, self._step = act, step

    def on_batch_end(self, runner: dl.IRunner) -> None:
        if runner.is_train_loader and self._step in (None, runner.batch_step):
            self._act()


def objects(url: str) -> list[str]:
    """List the objects of a run."""
    return Store(url).names()


def named(url: str) -> list[str]:
    """List the objects that the manifest names, and the manifest: a run must leave these, and no others."""
    found = Store(url).read("manifest.json")
    assert found is not None
    content = json.loads(found[0])
    return sorted({"manifest.json", *content["logs"], *(each["object"] for each in content["checkpoints"].values())})
