"""Train in two processes, and compare the weights with those of one process that has the same global batch.

python examples/first_hour/two_processes.py
"""

from typing import Any

import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


def loader(train: bool, batch_size: int) -> dl.TensorLoader:
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=batch_size, shuffle=train)


def train(batch_size: int, **where: Any) -> dl.SupervisedRunner:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        loaders={key: loader(key == "train", batch_size) for key in ("train", "valid")},
        callbacks=[dl.AccuracyCallback()],
        num_epochs=5,
        cpu=True,
        **where,
    )


one = train(batch_size=64)
two = train(batch_size=32, ddp=True)  # the batch size is per process
pairs = zip(one.model.parameters(), two.model.parameters(), strict=True)
difference = max(float((ours - theirs).detach().abs().max()) for ours, theirs in pairs)
first, second = (each.epoch_metrics["valid"]["accuracy"] for each in (one, two))
both = f"in 1 process {first:.4f}, in {two.engine.num_processes} processes {second:.4f}"
print(f"accuracy {both}; the weights differ by {difference:.0e} at most")
