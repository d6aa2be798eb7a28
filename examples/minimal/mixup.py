"""Mixup: training batches are mixed on the device, and evaluation batches are unchanged."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Beta
from torch.nn.functional import one_hot

from runnerkit import dl
from runnerkit.contrib import Digits


class Mixup(nn.Module):
    """Weighted means of pairs of samples and of their targets, with the same weights (arXiv:1710.09412)."""

    def forward(self, features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        targets = one_hot(targets, 10).float()
        if not self.training:
            return features, targets
        weight, other = Beta(1.0, 1.0).sample().to(features), torch.randperm(len(features), device=features.device)
        return torch.lerp(features[other], features, weight), torch.lerp(targets[other], targets, weight)


def loader(train: bool) -> dl.TensorLoader:
    """Load digits: 64 pixels, and the class as target to mix and as label; in training, every fourth is wrong."""
    digits = Digits(train=train)
    targets = digits.targets.clone()
    if train:
        targets[::4] = (targets[::4] + 1) % 10
    batch = {"features": digits.images.flatten(1) / 255, "targets": targets, "classes": targets}
    return dl.TensorLoader(batch, batch_size=100, shuffle=train)


def train(callbacks: Sequence[dl.ICallback], **where: Any) -> dict[str, float]:
    """Train; return the metrics on unseen images."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.005),
        loaders={"train": loader(train=True), "valid": loader(train=False)},
        callbacks=[*callbacks, dl.AccuracyCallback("logits", "classes")],
        num_epochs=25,
        loggers={"console": None},
        **where,
    )
    return runner.epoch_metrics["valid"]


def main(**where: Any) -> dict[str, float]:
    """Train with and without mixup; return both accuracies."""
    mixed = train([dl.BatchTransformCallback(Mixup(), input_key=["features", "targets"])], **where)
    plain = train([], **where)
    return {"accuracy": mixed["accuracy"], "without": plain["accuracy"]}


if __name__ == "__main__":
    learned = main()
    print(
        "accuracy {accuracy:.1%} (without mixup {without:.1%}) after training with 25 % wrong labels".format(**learned)
    )
