"""Two models by key, each with its optimizer: an encoder for image halves, and a head on both codes."""

from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl
from runnerkit.contrib import Digits


class Halves(dl.Runner):
    """A runner that encodes the halves of an image separately."""

    def handle_batch(self, batch: tuple[Tensor, Tensor]) -> None:
        pixels, targets = batch
        left, right = (self.model["encoder"](half.flatten(1)) for half in pixels.chunk(2, dim=2))
        logits = self.model["head"](torch.cat([left, right], dim=1))
        self.batch = {"logits": logits, "targets": targets}
        self.batch_metrics["loss"] = self.criterion(logits, targets)


def loader(train: bool) -> dl.TensorLoader:
    """Load digits: (8, 8) pixels in [0, 1] and one of ten classes."""
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images / 255, digits.targets, batch_size=64, shuffle=train)


def main(**where: Any) -> dict[str, float]:
    """Train; return the accuracy."""
    torch.manual_seed(0)
    model = {"encoder": nn.Sequential(nn.Linear(32, 32), nn.ReLU()), "head": nn.Linear(64, 10)}
    runner = Halves().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer={key: torch.optim.Adam(each.parameters(), lr=0.01) for key, each in model.items()},
        loaders={"train": loader(train=True), "valid": loader(train=False)},
        callbacks=[
            dl.BackwardCallback("loss"),
            dl.OptimizerCallback("loss", model_key="encoder", optimizer_key="encoder"),
            dl.OptimizerCallback("loss", model_key="head", optimizer_key="head"),
            dl.AccuracyCallback("logits", "targets"),
        ],
        num_epochs=10,
        loggers={"console": None},
        **where,
    )
    return {"accuracy": runner.epoch_metrics["valid"]["accuracy"]}


if __name__ == "__main__":
    learned = main()
    print("accuracy {accuracy:.1%}".format(**learned))
