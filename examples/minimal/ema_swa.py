"""Averages of the weights: of a walk that never settles, the mean is nearer to the goal than the last step."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from runnerkit import dl


def train(callbacks: Sequence[dl.ICallback], **where: Any) -> float:
    """Train by a learning rate so large that the weights never settle; return their distance from least squares."""
    torch.manual_seed(0)
    features = torch.randn(1000, 20)
    targets = features @ torch.randn(20, 1) + torch.randn(1000, 1)
    model = nn.Linear(20, 1, bias=False)
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.MSELoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.05),
        loaders={"train": dl.TensorLoader(features, targets, batch_size=10, shuffle=True)},
        callbacks=callbacks,
        num_epochs=10,
        loggers={"console": None},
        **where,
    )
    return float((runner.model.weight.detach().cpu() - torch.linalg.lstsq(features, targets).solution.T).norm())


def main(**where: Any) -> dict[str, float]:
    """Train three times, alike but for the average; the model that a stage ends with is the averaged one."""
    return {
        "last": train([], **where),
        "ema": train([dl.EMACallback(decay=0.99)], **where),
        "swa": train([dl.SWACallback(start_epoch=4)], **where),
    }


if __name__ == "__main__":
    learned = main()
    print("from least squares: last weights {last:.3f}, EMA {ema:.3f}, SWA {swa:.3f}".format(**learned))
