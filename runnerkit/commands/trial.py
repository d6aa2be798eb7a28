"""Training of one trial of a hyperparameter search."""

from __future__ import annotations

import importlib
import math
from pathlib import Path
from typing import Any, Literal

from runnerkit.callbacks import OptunaPruningCallback
from runnerkit.commands.config import Config, TrainingError
from runnerkit.commands.configured_run import FILE, make_run, save_config, train
from runnerkit.monitor import Monitor


def train_trial(
    config: Config, trial: Any, logdir: Path, monitor: Monitor, *, resume: Literal["auto"] | None = None
) -> float:
    """Train the config of a trial; return the metric of the best epoch, NaN if it is NaN in each.

    Args:
        trial: Optuna's, or one with `number`, `report` and `should_prune`, which are used if it has one process.
        logdir: of the search; the trial gets a folder in it.
        monitor: the metric, with its direction.
        resume: "auto" continues a trial that was killed.
    Raises:
        optuna.TrialPruned: the trial is pruned.
        ValueError, TrainingError: as :func:`.configured_run.train`; also if no epoch has the metric.
    """
    runner, arguments = make_run(config)
    if arguments["engine"] is None or not arguments["engine"].is_ddp:  # pruning needs the epochs in this process
        given = arguments["callbacks"] or {}
        callbacks = given if isinstance(given, dict) else {str(place): each for place, each in enumerate(given)}
        mode: Literal["min", "max"] = "min" if monitor.minimize else "max"
        pruning = OptunaPruningCallback(trial, monitor=monitor.name, mode=mode)
        arguments["callbacks"] = {**callbacks, "_pruning": pruning}
    folder = logdir / f"trial-{trial.number:03}"
    save_config(config, folder / FILE)
    try:
        train(config, runner, {**arguments, "logdir": folder, "resume": resume})
    except TrainingError as error:
        cause = error.__cause__
        if cause is not None and isinstance(cause, optuna_package().TrialPruned):
            raise cause from None
        raise
    epochs = runner.experiment_metrics.values()
    loader, metric = monitor.among({key for epoch in epochs for key in epoch}).pair  # as get_loaders may name them
    scores = [epoch[loader][metric] for epoch in epochs if loader in epoch]
    if not scores:
        raise ValueError(f"no epoch has {monitor.name}, which selects the best trial: does its loader run?")
    known = [score for score in scores if not math.isnan(score)] or scores
    return min(known) if monitor.minimize else max(known)


def optuna_package() -> Any:
    """Import Optuna.

    Raises:
        ImportError: it is not installed; the message tells how to do so.
    """
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise ImportError("a search needs Optuna: pip install 'runnerkit[optuna]'") from None
