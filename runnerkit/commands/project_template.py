"""The files of the project that `runnerkit new NAME` writes; @NAME@ stands for its name."""

from __future__ import annotations

_README = """\
# @NAME@

A classifier, trained by [runnerkit](https://pypi.org/project/runnerkit). `task.py` has the data and the model: replace
them with your own.

```bash
pip install "runnerkit[config,metrics,rich]" pytest
runnerkit run config.yaml --logdir logs/first   # or: python train.py
runnerkit metrics logs/first                    # --json for programs
runnerkit watch logs/first                      # while it trains
python -m pytest
```

`logs/first/status.json` tells programs how far the run is, and how it ended. `runnerkit docs cli` explains the
commands.
"""

_TASK = '''\
"""The data and the model of @NAME@."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NUM_FEATURES, NUM_CLASSES = 8, 3


def make_data(num_samples: int, seed: int) -> TensorDataset:
    """Draw (N, 8) features; the class of a sample is the index of the largest of its first three."""
    features = torch.randn(num_samples, NUM_FEATURES, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(features, features[:, :NUM_CLASSES].argmax(dim=1))


def make_loader(num_samples: int, seed: int, batch_size: int, shuffle: bool = False) -> DataLoader:
    """Return batches (features, targets), which a SupervisedRunner names so."""
    return DataLoader(make_data(num_samples, seed), batch_size=batch_size, shuffle=shuffle)


def make_model(width: int) -> nn.Module:
    """Map (N, 8) features to (N, 3) logits."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, width), nn.ReLU(), nn.Linear(width, NUM_CLASSES))
'''

_CONFIG = """\
# runnerkit run config.yaml --logdir logs/first hparams.lr=0.02 num_epochs=10
hparams: {lr: 0.01, width: 64}

model: {_target_: task.make_model, width: "${hparams.width}"}
criterion: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.AdamW, lr: "${hparams.lr}"}
loaders:
  train: {_target_: task.make_loader, num_samples: 2000, seed: 0, batch_size: 32, shuffle: true}
  valid: {_target_: task.make_loader, num_samples: 500, seed: 1, batch_size: 100}
callbacks:
  accuracy: {_target_: runnerkit.dl.AccuracyCallback}

num_epochs: 5
monitor: valid/accuracy
mode: max
seed: 42
"""

_SCRIPT = '''\
"""Train @NAME@: the run of config.yaml as a script, to be changed where a config does not suffice.

python train.py
runnerkit run train.py --engine ddp --nproc 2
"""

from pathlib import Path

import torch
from torch import nn

from runnerkit import dl, utils
from task import make_loader, make_model

SEED = 42


def train(logdir: str | Path, *, num_epochs: int = 5, lr: float = 0.01, width: int = 64) -> dl.SupervisedRunner:
    """Train, or continue the run in `logdir`; write logs and checkpoints there."""
    utils.set_global_seed(SEED)  # for the initial weights; `train` seeds the rest
    model = make_model(width)
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=lr),
        loaders={
            "train": make_loader(2000, seed=0, batch_size=32, shuffle=True),
            "valid": make_loader(500, seed=1, batch_size=100),
        },
        callbacks=[dl.AccuracyCallback()],
        hparams={"lr": lr, "width": width},
        num_epochs=num_epochs,
        logdir=logdir,
        resume="auto",
        monitor="valid/accuracy",
        mode="max",
        seed=SEED,
    )


if __name__ == "__main__":
    train("logs/script")
'''

_TEST = '''\
"""Tests of @NAME@: python -m pytest"""

import json
import subprocess
import sys
from pathlib import Path

from train import train

FOLDER = Path(__file__).parent


def test_the_model_learns(tmp_path):
    """Two epochs suffice for most samples of the validation."""
    runner = train(tmp_path / "run", num_epochs=2)

    assert runner.epoch_metrics["valid"]["accuracy"] > 0.8


def test_an_interrupted_run_continues_exactly(tmp_path):
    """An epoch, and another one after a new start, are as two epochs without a break."""
    train(tmp_path / "parts", num_epochs=1)
    in_parts = train(tmp_path / "parts", num_epochs=2)

    assert in_parts.epoch_metrics == train(tmp_path / "whole", num_epochs=2).epoch_metrics


def test_the_config_trains(tmp_path):
    """A short run of config.yaml ends without an error."""
    logdir = tmp_path / "run"
    command = [sys.executable, "-m", "runnerkit", "run", "config.yaml", "--logdir", str(logdir), "num_epochs=1"]

    subprocess.run(command, cwd=FOLDER, check=True)

    assert json.loads((logdir / "status.json").read_text())["state"] == "finished"
'''

FILES = {
    "README.md": _README,
    ".gitignore": "__pycache__/\n/logs/\n",
    "task.py": _TASK,
    "config.yaml": _CONFIG,
    "train.py": _SCRIPT,
    "test_training.py": _TEST,
}
