"""Mixup: training batches are mixed with themselves on the device; evaluation sees them as they are."""

import torch
from torch import nn
from torch.distributions import Beta
from torch.nn.functional import one_hot

from runnerkit import dl
from runnerkit.contrib import Digits


class Mixup(nn.Module):
    """Give a mean of each sample and another, and of their classes, weighted alike (arXiv:1710.09412)."""

    def forward(self, features, targets):
        targets = one_hot(targets, 10).float()
        if not self.training:
            return features, targets
        weight, other = Beta(1.0, 1.0).sample().to(features), torch.randperm(len(features), device=features.device)
        return torch.lerp(features[other], features, weight), torch.lerp(targets[other], targets, weight)


def loader(train):
    """Load digits, of the training part 200 only: 64 pixels in [0, 1], and a class of ten twice, one to mix."""
    digits = Digits(train=train)
    limit = 200 if train else None
    batch = {"features": digits.images.flatten(1)[:limit] / 255, "targets": digits.targets[:limit]}
    return dl.TensorLoader({**batch, "classes": batch["targets"]}, batch_size=50, shuffle=train)


def train(callbacks, **where):
    """Train; return the metrics on images that it has not seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.005),
        loaders={"train": loader(train=True), "valid": loader(train=False)},
        callbacks=[*callbacks, dl.AccuracyCallback("logits", "classes")],
        num_epochs=100,
        loggers={"console": None},
        **where,
    )
    return runner.epoch_metrics["valid"]


def main(**where):
    """Train with and without; return both losses and the accuracy."""
    mixed = train([dl.BatchTransformCallback(Mixup(), input_key=["features", "targets"])], **where)
    plain = train([], **where)
    return {"loss": mixed["loss"], "loss_without": plain["loss"], "accuracy": mixed["accuracy"]}


if __name__ == "__main__":
    learned = main()
    print("valid loss {loss:.3f} (without mixup {loss_without:.3f}), accuracy {accuracy:.1%}".format(**learned))
