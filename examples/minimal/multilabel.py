"""Several labels per sample: is a digit odd, is it greater than four, does it have a hole?"""

from typing import Any

import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


def loader(train: bool) -> dl.TensorLoader:
    """Load digits: 64 pixels in [0, 1] and three binary labels."""
    digits = Digits(train=train)
    answers = [digits.targets % 2 == 1, digits.targets > 4, torch.isin(digits.targets, torch.tensor([0, 6, 8, 9]))]
    targets = torch.stack(answers, dim=1).float()
    return dl.TensorLoader(digits.images.flatten(1) / 255, targets, batch_size=64, shuffle=train)


def main(**where: Any) -> dict[str, float]:
    """Train; return the accuracy, that of the most frequent labels, and the mean AUC."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
    loaders = {"train": loader(train=True), "valid": loader(train=False)}
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.BCEWithLogitsLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders=loaders,
        callbacks=[
            dl.MultilabelAccuracyCallback(threshold=0),  # a logit of 0 is a probability of 1/2
            dl.AUCCallback(),
        ],
        num_epochs=10,
        loggers={"console": None},
        **where,
    )
    share = torch.cat([targets for _, targets in loaders["valid"]]).mean(dim=0)
    metrics = runner.epoch_metrics["valid"]
    return {
        "accuracy": metrics["accuracy"],
        "accuracy_of_commonest": torch.maximum(share, 1 - share).mean().item(),
        "auc": metrics["auc/_macro"],
    }


if __name__ == "__main__":
    learned = main()
    print("accuracy {accuracy:.1%} (most frequent labels {accuracy_of_commonest:.1%}), AUC {auc:.3f}".format(**learned))
