"""Predict a data set in several processes and write one file, with a row per sample in the data set's order.

python examples/predict_to_file.py --out predictions.parquet
torchrun --standalone --nproc-per-node=2 examples/predict_to_file.py --out predictions.csv
"""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.contrib import Digits, ImageToTensor


class Classifier(dl.SupervisedRunner):
    """A runner that predicts the class and all probabilities."""

    def predict_batch(self, batch: Any, **kwargs: Any) -> dict[str, Tensor]:
        images, targets = batch
        probabilities = self.model(images).softmax(dim=1)
        return {"target": targets, "predicted": probabilities.argmax(dim=1), "probability": probabilities}


def main(arguments: Sequence[str] | None = None) -> None:
    """Train on scikit-learn's digits, then write predictions for unseen ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="predictions.parquet", help="a .parquet or .csv file")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--local-rank", "--local_rank", help=argparse.SUPPRESS)  # torch.distributed.launch adds it
    options = parser.parse_args(arguments)
    digits = {key: Digits(train=key == "train", transform=ImageToTensor()) for key in ("train", "valid")}
    torch.manual_seed(42)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    runner = Classifier().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loaders={"train": DataLoader(digits["train"], batch_size=32, shuffle=True)},
        num_epochs=options.epochs,
        ddp=True,
    )
    path = runner.predict_to(options.out, loader=DataLoader(digits["valid"], batch_size=32), ddp=True)
    if runner.engine.is_main_process:
        print(f"{len(digits['valid'])} rows in {path}")


if __name__ == "__main__":
    main()
