"""Lose a run in its third epoch, start the same call again, and end with the bits of a run that was not interrupted.

python examples/first_hour/resume.py
"""

from pathlib import Path
from tempfile import mkdtemp

import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


class PowerCut(dl.Callback):
    def on_batch_end(self, runner: dl.IRunner) -> None:
        if runner.is_train_loader and (runner.epoch_step, runner.loader_batch_step) == (3, 5):
            raise RuntimeError("the power is gone")


def train(logdir: Path, *callbacks: dl.Callback) -> dl.SupervisedRunner:
    torch.manual_seed(0)
    digits = Digits()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={"train": dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=True)},
        callbacks=callbacks,
        num_epochs=4,
        logdir=logdir,
        resume="auto",  # a new run, or the last checkpoint of this logdir
    )


folder = Path(mkdtemp())
try:
    train(folder / "interrupted", PowerCut())
except RuntimeError as error:
    print(f"{error}; the same call again:")
resumed = train(folder / "interrupted")
whole = train(folder / "whole")
same = all(map(torch.equal, resumed.model.parameters(), whole.model.parameters()))
same = same and resumed.experiment_metrics == whole.experiment_metrics
how = "equal" if same else "NOT equal"
print(f"weights and metrics of {len(whole.experiment_metrics)} epochs are {how}, bit for bit")
