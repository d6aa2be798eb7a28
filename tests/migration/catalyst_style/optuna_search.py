"""A search of Optuna's over the width of a model, with pruning."""

import optuna
import torch
from catalyst import dl
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def objective(trial):
    draw = torch.Generator().manual_seed(0)
    features = torch.randn(120, 8, generator=draw)
    loader = DataLoader(TensorDataset(features, features[:, :4].argmax(dim=1)), batch_size=32)
    width = trial.suggest_categorical("width", [4, 16])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
    runner = dl.SupervisedRunner()
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loaders={"train": loader, "valid": loader},
        callbacks={
            "accuracy": dl.AccuracyCallback("logits", "targets", topk=(1,)),
            "pruning": dl.OptunaPruningCallback(trial=trial, loader_key="valid", metric_key="loss", minimize=True),
        },
        num_epochs=3,
    )
    return trial.best_score


def main():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(
        direction="minimize",
        sampler=optuna.samplers.GridSampler({"width": [4, 16]}, seed=0),
        pruner=optuna.pruners.NopPruner(),
    )
    study.optimize(objective, n_trials=2)
    return {"best": study.best_value, "width": study.best_params["width"], "trials": len(study.trials)}
