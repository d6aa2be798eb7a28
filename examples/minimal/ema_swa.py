"""Weight averages: if training never converges, the mean is closer to the optimum than the last weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from runnerkit import dl


def train(callbacks: Sequence[dl.ICallback], **where: Any) -> float:
    """Train at a rate too large to converge; return the distance of the weights from least squares."""
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
    """Train without and with each average; the model at the end of a stage is the averaged one."""
    return {
        "last": train([], **where),
        "ema": train([dl.EMACallback(decay=0.99)], **where),
        "swa": train([dl.SWACallback(start_epoch=4)], **where),
    }


if __name__ == "__main__":
    learned = main()
    print("distance from least squares: last weights {last:.3f}, EMA {ema:.3f}, SWA {swa:.3f}".format(**learned))
