"""LR finder: a sweep on a throwaway model suggests the learning rate for training."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


def loader(train: bool) -> dl.TensorLoader:
    """Load digits: 64 pixels in [0, 1] and one of ten classes."""
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=32, shuffle=train)


def train(lr: float, callbacks: Sequence[dl.ICallback], **options: Any) -> dl.SupervisedRunner:
    """Train a new model with plain SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        callbacks=callbacks,
        loggers={"console": None},
        **options,
    )


def main(plot: str | None = None, **where: Any) -> dict[str, float]:
    """Sweep, then train at the suggested rate and at the sweep's first rate; plot the losses to the path `plot`."""
    first_lr = 1e-4
    finder = dl.LRFinder(final_lr=100.0, num_steps=200)
    train(first_lr, [finder], loaders={"train": loader(train=True)}, num_epochs=10, **where)
    if plot is not None:
        finder.plot(plot)
    loaders = {"train": loader(train=True), "valid": loader(train=False)}
    learned = {"suggestion": finder.suggestion, "diverged": finder.lrs[-1]}
    for name, lr in {"accuracy": finder.suggestion, "accuracy_of_first": first_lr}.items():
        runner = train(lr, [dl.AccuracyCallback()], loaders=loaders, num_epochs=5, **where)
        learned[name] = runner.epoch_metrics["valid"]["accuracy"]
    return learned


if __name__ == "__main__":
    learned = main()
    told = (
        "accuracy {accuracy:.1%} at lr {suggestion:.2g}, {accuracy_of_first:.1%} at 0.0001; diverges at {diverged:.2g}"
    )
    print(told.format(**learned))
