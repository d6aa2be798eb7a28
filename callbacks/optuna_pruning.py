"""Trials of an Optuna study that end as soon as they are no good."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runnerkit.arguments import check_strings
from runnerkit.callback import Callback, CallbackOrder

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class OptunaPruningCallback(Callback):
    """Report a metric to a trial after each epoch, and raise ``optuna.TrialPruned`` when its study says so.

    In the process of the study, so with engines of one process. Optuna counts the trial as pruned; the epoch is logged
    and saved before.

    Args:
        trial: what Optuna hands to the objective.
        loader_key, metric_key: the metric, which the objective should return.
        minimize: whether less is better, to have that compared with the study's direction; None is whatever it says.
    Raises:
        ValueError: the study's direction is the other one.

    >>> import optuna
    >>> OptunaPruningCallback(optuna.trial.FixedTrial({}), "valid", "accuracy").requires
    (('valid', 'accuracy'),)
    """

    shapes_training = True

    def __init__(self, trial: Any, loader_key: str, metric_key: str, minimize: bool | None = None) -> None:
        super().__init__(order=CallbackOrder.External)
        check_strings(self, loader_key=loader_key, metric_key=metric_key)
        if not callable(getattr(trial, "should_prune", None)):
            raise TypeError(f"OptunaPruningCallback: trial must be a trial of Optuna, got {trial!r}")
        study = getattr(trial, "study", None)  # a FixedTrial has none
        if minimize is not None and study is not None and minimize != (study.direction.name == "MINIMIZE"):
            raise ValueError(
                f"OptunaPruningCallback: minimize={minimize}, but the study's direction is "
                f"{study.direction.name.lower()!r}"
            )
        self.trial = trial
        self.loader_key, self.metric_key = loader_key, metric_key
        self.requires = ((loader_key, metric_key),)

    def on_stage_start(self, runner: IRunner) -> None:
        if runner.engine.num_processes > 1:
            raise ValueError(
                f"OptunaPruningCallback reports to a study in its own process; {type(runner.engine).__name__} has "
                f"{runner.engine.num_processes}: run each trial in one, such as dl.GPUEngine()"
            )

    def on_epoch_end(self, runner: IRunner) -> None:
        if self.loader_key not in runner.epoch_metrics:
            return
        score = runner.epoch_metrics[self.loader_key][self.metric_key]
        self.trial.report(score, step=runner.epoch_step)
        if self.trial.should_prune():
            optuna = importlib.import_module("optuna")
            raise optuna.TrialPruned(
                f"{self.metric_key} of {self.loader_key} is {score} after epoch {runner.epoch_step}"
            )
