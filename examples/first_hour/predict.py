"""Load the best weights of a logdir, as another program would, and write a prediction for each sample to a file.

python examples/first_hour/predict.py
"""

from typing import Any

import torch
from torch import Tensor, nn

from runnerkit import dl
from runnerkit.contrib import Digits

LOGDIR = "logs/first_hour/predict"


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def loader(train: bool) -> dl.TensorLoader:
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=train)


class Reader(dl.SupervisedRunner):
    def predict_batch(self, batch: Any, **kwargs: Any) -> dict[str, Tensor]:
        confidence, digit = super().predict_batch(batch)["logits"].softmax(dim=1).max(dim=1)
        return {"digit": digit, "confidence": confidence, "target": batch[1]}


torch.manual_seed(0)
Reader(make_model()).train(
    criterion=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    loaders={"train": loader(train=True), "valid": loader(train=False)},
    num_epochs=5,
    logdir=LOGDIR,
    monitor="valid/loss",
    resume="auto",
)
reader = Reader(make_model()).load(LOGDIR)
frame = reader.predict_frame(loader=loader(train=False))
wrong = frame[frame["digit"] != frame["target"]]
print("errors with the highest confidence:", wrong.nlargest(5, "confidence").to_string(), sep="\n")
path = reader.predict_to(f"{LOGDIR}/predictions.csv", loader=loader(train=False))
print(f"{len(frame) - len(wrong)} of {len(frame)} digits are right; all are in {path}")
