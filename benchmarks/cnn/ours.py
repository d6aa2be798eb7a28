"""Case b in runnerkit: SupervisedRunner with the DataLoaders that all candidates use."""

from typing import Any

from torch import nn

from benchmarks.cnn import work
from runnerkit import dl


def train(images: dict[str, work.Images]) -> work.Metrics:
    return fit(work.make_model(images), work.loaders(images))


def fit(model: nn.Module, loaders: dict[str, Any], *more: dl.Callback) -> work.Metrics:
    """Train and validate, with additional callbacks."""
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=work.make_optimizer(model),
        loaders=loaders,
        callbacks=[dl.AccuracyCallback("logits", "targets"), *more],
        loggers={"console": None},
        cpu=True,
    )
    return runner.epoch_metrics


if __name__ == "__main__":
    work.main(train)
