"""Two heads on one body: the outputs of a tuple get names, each with its own criterion callback."""

from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl
from runnerkit.contrib import Digits


class TwoHeads(nn.Module):
    """A network that classifies a digit and its parity."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
        self.digit, self.parity = nn.Linear(64, 10), nn.Linear(64, 2)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(pixels)
        return self.digit(hidden), self.parity(hidden)


def loader(train: bool) -> dl.TensorLoader:
    """Load digits; a batch is a dict because there are two targets."""
    digits = Digits(train=train)
    batch = {"pixels": digits.images.flatten(1) / 255, "digit": digits.targets, "parity": digits.targets % 2}
    return dl.TensorLoader(batch, batch_size=64, shuffle=train)


def main(**where: Any) -> dict[str, float]:
    """Train; return the accuracy of each head."""
    torch.manual_seed(0)
    model = TwoHeads()
    runner = dl.SupervisedRunner(input_key="pixels", output_key=["digit_logits", "parity_logits"]).train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
        loaders={"train": loader(train=True), "valid": loader(train=False)},
        callbacks=[
            dl.CriterionCallback("digit_logits", "digit", metric_key="digit_loss"),
            dl.CriterionCallback("parity_logits", "parity", metric_key="parity_loss"),
            dl.MetricAggregationCallback("loss", {"digit_loss": 1.0, "parity_loss": 0.5}, reduction="weighted_sum"),
            dl.AccuracyCallback("digit_logits", "digit", prefix="digit_"),
            dl.AccuracyCallback("parity_logits", "parity", prefix="parity_"),
        ],
        num_epochs=8,
        loggers={"console": None},
        **where,
    )
    return {key: runner.epoch_metrics["valid"][key] for key in ("digit_accuracy", "parity_accuracy")}


if __name__ == "__main__":
    learned = main()
    print("accuracy: digit {digit_accuracy:.1%}, parity {parity_accuracy:.1%}".format(**learned))
