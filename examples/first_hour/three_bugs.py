"""Make three mistakes that everyone makes, read what the errors say, and train without them.

python examples/first_hour/three_bugs.py
"""

from functools import partial
from traceback import format_exception_only
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl
from runnerkit.contrib import Digits


class Log(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return pixels.log()


def loader(train: bool) -> dl.TensorLoader:
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=train)


def train(*layers: nn.Module, metric: str = "accuracy", **options: Any) -> dl.SupervisedRunner:
    torch.manual_seed(0)
    model = nn.Sequential(*layers)
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={"train": loader(train=True), "valid": loader(train=False)},
        callbacks=[dl.AccuracyCallback()],
        loggers={"console": None},
        num_epochs=3,
        monitor=f"valid/{metric}",
        mode="max",
        **options,
    )


MISTAKES = {
    "the loss is NaN": partial(train, Log(), nn.Linear(64, 10), non_finite="locate"),
    "a metric is misspelt": partial(train, nn.Linear(64, 10), metric="acuracy"),
    "a layer has the wrong shape": partial(train, nn.Linear(64, 32), nn.ReLU(), nn.Linear(64, 10)),
}
for mistake, make in MISTAKES.items():
    try:
        make()
    except Exception as error:
        print(f"{mistake}:", "".join(format_exception_only(error)), sep="\n")
runner = train(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
print(f"without mistakes: accuracy {runner.epoch_metrics['valid']['accuracy']:.1%} after {runner.epoch_step} epochs")
