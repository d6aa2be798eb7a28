"""Train your own model on your own data; stop when the validation no longer improves, and keep the best weights.

python examples/first_hour/own_project.py
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runnerkit import dl


class Spirals(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, number: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.targets = torch.arange(number) % 2
        radius = torch.rand(number, generator=draw).sqrt()
        angle = torch.pi * (3 * radius + self.targets)
        points = torch.stack([radius * angle.cos(), radius * angle.sin()], dim=1)
        self.points = points + 0.05 * torch.randn(number, 2, generator=draw)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.targets[index]


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
runner = dl.SupervisedRunner().train(
    model=model,
    criterion=nn.CrossEntropyLoss(),
    optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
    loaders={
        "train": DataLoader(Spirals(600, seed=0), batch_size=50, shuffle=True),
        "valid": DataLoader(Spirals(600, seed=1), batch_size=200),
    },
    callbacks=[
        dl.AccuracyCallback(),
        dl.EarlyStoppingCallback(patience=5, monitor="valid/loss", mode="min"),
    ],
    num_epochs=100,
    logdir="logs/first_hour/own_project",
    monitor="valid/loss",  # the best epoch has the smallest loss here,
    load_best_on_end=True,  # and the model ends with its weights
    resume="auto",
)
best = min((each["valid"] for each in runner.experiment_metrics.values()), key=lambda metrics: metrics["loss"])
print(f"{len(runner.experiment_metrics)} epochs of 100; the best: accuracy {best['accuracy']:.1%}")
