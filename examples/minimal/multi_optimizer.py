"""Two optimizers on one model: Muon for the matrices, AdamW for the rest; one loss, one backward pass."""

from typing import Any

import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


def loader(train: bool) -> dl.TensorLoader:
    """Load digits: 64 pixels in [0, 1] and one of ten classes."""
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=train)


def main(**where: Any) -> dict[str, float]:
    """Train; return the accuracy, and how far each optimizer moved its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    before = [each.clone() for each in model.parameters()]
    matrices = [each for each in model.parameters() if each.ndim == 2]
    vectors = [each for each in model.parameters() if each.ndim < 2]
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer={"muon": torch.optim.Muon(matrices, lr=0.02), "adamw": torch.optim.AdamW(vectors, lr=0.01)},
        loaders={"train": loader(train=True), "valid": loader(train=False)},
        callbacks=[
            dl.OptimizerCallback("loss", optimizer_key="muon"),
            dl.OptimizerCallback("loss", optimizer_key="adamw"),
            dl.AccuracyCallback(),
        ],
        num_epochs=5,
        loggers={"console": None},
        **where,
    )
    moved = [(now.cpu() - then).abs().max().item() for now, then in zip(model.parameters(), before, strict=True)]
    return {
        "accuracy": runner.epoch_metrics["valid"]["accuracy"],
        "matrices_moved": min(moved[0::2]),
        "vectors_moved": min(moved[1::2]),
    }


if __name__ == "__main__":
    learned = main()
    print("accuracy {accuracy:.1%}; matrices moved {matrices_moved:.2f}, vectors {vectors_moved:.2f}".format(**learned))
