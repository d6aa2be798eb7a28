"""Hyperparameter search with Optuna, which prunes trials that are worse than the median at the same epoch."""

from typing import Any

import optuna
import torch
from torch import nn

from runnerkit import dl
from runnerkit.contrib import Digits


def loader(train: bool) -> dl.TensorLoader:
    """Load digits: 64 pixels in [0, 1] and one of ten classes."""
    digits = Digits(train=train)
    return dl.TensorLoader(digits.images.flatten(1) / 255, digits.targets, batch_size=64, shuffle=train)


def main(num_trials: int = 15, **where: Any) -> dict[str, Any]:
    """Search; return the accuracies of all trials (for pruned ones the last), and the best hyperparameters."""
    loaders = {"train": loader(train=True), "valid": loader(train=False)}

    def objective(trial: optuna.Trial) -> float:
        lr, width = trial.suggest_float("lr", 1e-5, 1.0, log=True), trial.suggest_int("width", 8, 64)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
        runner = dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=torch.optim.Adam(model.parameters(), lr=lr),
            loaders=loaders,
            callbacks=[
                dl.AccuracyCallback(),
                dl.OptunaPruningCallback(trial, monitor="valid/accuracy", mode="max"),
            ],
            num_epochs=5,
            loggers={"console": None},
            **where,
        )
        return runner.epoch_metrics["valid"]["accuracy"]

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=1)
    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0), pruner=pruner)
    study.optimize(objective, n_trials=num_trials)
    parts = {name: study.get_trials(states=[optuna.trial.TrialState[name]]) for name in ("COMPLETE", "PRUNED")}
    accuracies = {name.lower(): [trial.value for trial in trials] for name, trials in parts.items()}
    return {"best": study.best_value, **study.best_params, **accuracies}


if __name__ == "__main__":
    learned = main()
    pruned, num_trials = len(learned["pruned"]), len(learned["pruned"] + learned["complete"])
    print("accuracy {best:.1%} at lr {lr:.2g}, width {width}; ".format(**learned) + f"{pruned} of {num_trials} pruned")
