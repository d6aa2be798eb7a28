"""Train with three learning rates, and compare the runs: a table, their curves as numbers, and one page.

python examples/first_hour/sweep.py
"""

import torch
from torch import nn

from runnerkit import compare_runs, dl, read_metrics, write_report
from runnerkit.contrib import Digits


def loader(train: bool) -> dl.TensorLoader:
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=train)


for lr in (0.1, 0.01, 0.001):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=lr),
        loaders={"train": loader(train=True), "valid": loader(train=False)},
        callbacks=[dl.AccuracyCallback()],
        loggers={"console": None},
        hparams={"lr": lr},
        num_epochs=5,
        logdir=f"logs/first_hour/sweep/lr={lr}",
        monitor="valid/accuracy",
        mode="max",
        resume="auto",
    )
runs = compare_runs("logs/first_hour/sweep")  # the best first
print(runs[["lr", "best", "best_epoch", "last"]].round(3).to_string(index=False))
curves = read_metrics("logs/first_hour/sweep").query("loader == 'valid' and metric == 'accuracy'")
print(curves.pivot(index="epoch", columns="lr", values="value").round(3).to_string())
page = write_report("logs/first_hour/sweep")
print(f"best learning rate {runs['lr'].iloc[0]}, accuracy {runs['best'].iloc[0]:.1%}; the runs side by side: {page}")
