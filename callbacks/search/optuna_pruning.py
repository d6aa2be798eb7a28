"""Pruning of unpromising Optuna trials."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.support.arguments import check_strings

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["OptunaPruningCallback"]


class OptunaPruningCallback(Callback):
    """Report a metric to a trial after each epoch, and raise ``optuna.TrialPruned`` if its study prunes the trial.

    It must run in the study's process, so with a single-process engine. The epoch is logged and saved before Optuna
    marks the trial as pruned. ``trial.best_score`` is the best value so far, for an
    objective to return.

    Args:
        trial: the trial that Optuna passes to the objective.
        loader_key, metric_key: the metric, which the objective should return.
        minimize: whether smaller values are better, to check the study's direction; None takes the direction.
    Raises:
        ValueError: `minimize` contradicts the study's direction.

    >>> import optuna
    >>> OptunaPruningCallback(optuna.trial.FixedTrial({}), "valid", "accuracy").requires
    (('valid', 'accuracy'),)
    """

    shapes_training = True

    def __init__(self, trial: Any, loader_key: str, metric_key: str, minimize: bool | None = None) -> None:
        super().__init__(order=CallbackOrder.External)
        check_strings(self, loader_key=loader_key, metric_key=metric_key)
        if not callable(getattr(trial, "should_prune", None)):
            raise TypeError(f"OptunaPruningCallback: trial must be an Optuna trial, got {trial!r}")
        study = getattr(trial, "study", None)  # a FixedTrial has none
        self.minimize = minimize if study is None else study.direction.name == "MINIMIZE"
        if study is not None and minimize not in (None, self.minimize):
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
                f"OptunaPruningCallback must run in the process of its study, but {type(runner.engine).__name__} has "
                f"{runner.engine.num_processes} processes: use an engine of one process, such as dl.GPUEngine()"
            )

    def on_epoch_end(self, runner: IRunner) -> None:
        if self.loader_key not in runner.epoch_metrics:
            return
        score = runner.epoch_metrics[self.loader_key][self.metric_key]
        self.trial.report(score, step=runner.epoch_step)
        best = getattr(self.trial, "best_score", score)
        self.trial.best_score = min(best, score) if self.minimize else max(best, score)
        if self.trial.should_prune():
            optuna = importlib.import_module("optuna")
            raise optuna.TrialPruned(
                f"{self.metric_key} of {self.loader_key} is {score} after epoch {runner.epoch_step}"
            )
