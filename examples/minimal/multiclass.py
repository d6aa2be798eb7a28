"""Classification with top-k accuracy from `AccuracyCallback`."""

from typing import Any

import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


def loader(train: bool) -> dl.TensorLoader:
    """Load scikit-learn's digits: 64 pixels in [0, 1] and one of ten classes."""
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=train)


def main(**where: Any) -> dict[str, float]:
    """Train; return the accuracies on unseen images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={"train": loader(train=True), "valid": loader(train=False)},
        callbacks=[dl.AccuracyCallback(topk=(1, 3))],
        num_epochs=8,
        loggers={"console": None},
        **where,
    )
    return {key: runner.epoch_metrics["valid"][key] for key in ("accuracy", "accuracy03")}


if __name__ == "__main__":
    learned = main()
    print("accuracy {accuracy:.1%}, top-3 {accuracy03:.1%}".format(**learned))
