"""K-fold cross-validation: a runner per fold, and the mean and deviation of their accuracies."""

from statistics import mean, stdev
from typing import Any

import torch
from sklearn.model_selection import StratifiedKFold
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


def main(num_folds: int = 5, **where: Any) -> dict[str, list[float]]:
    """Train once per fold; return the accuracies on the held-out folds."""
    digits = Digits(train=True)
    features = digits.images.flatten(1) / 255
    accuracies = []
    for parts in StratifiedKFold(num_folds, shuffle=True, random_state=0).split(features, digits.targets):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
        runner = dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            loaders={
                key: dl.TensorLoader(features[part], digits.targets[part], batch_size=64, shuffle=key == "train")
                for key, part in zip(("train", "valid"), parts, strict=True)
            },
            callbacks=[dl.AccuracyCallback()],
            num_epochs=5,
            loggers={"console": None},
            **where,
        )
        accuracies.append(runner.epoch_metrics["valid"]["accuracy"])
    return {"accuracies": accuracies}


if __name__ == "__main__":
    learned = main()
    folds = learned["accuracies"]
    print(f"accuracy {mean(folds):.1%} +- {stdev(folds):.1%} over {len(folds)} folds")
