"""Pruning of unpromising Optuna trials."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.monitor import Mode, Monitor, MonitorPart, ThreeArguments
from runnerkit.support.deprecation import accepts_old_names
from runnerkit.support.members import Member, Members

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["OptunaPruningCallback"]


class TrialMembers(Members):
    """Members of Optuna trials.

    Attributes:
        should_prune: what makes an object a trial.
        study: None in a FixedTrial.
        best_score: what :class:`OptunaPruningCallback` sets.
    """

    should_prune = Member[Callable[[], bool] | None](None)
    study = Member[Any](None)
    best_score = Member[float | None](None)


class OptunaPruningCallback(Callback):
    """Report a metric to a trial after each epoch, and raise ``optuna.TrialPruned`` if its study prunes the trial.

    It must run in the study's process, so with a single-process engine. The epoch is logged before Optuna marks the
    trial as pruned. ``trial.best_score`` is the best value so far, without NaN, for an objective to return.

    Args:
        trial: the trial that Optuna passes to the objective.
        monitor: the metric, which the objective should return, such as "valid/accuracy".
        mode: "min" or "max", to check the study's direction; None takes the direction. Of a trial without a study, such
            as a FixedTrial, it may be left out for a loss.
    Raises:
        ValueError: `mode` contradicts the study's direction, or is missing without one.

    >>> import optuna
    >>> OptunaPruningCallback(optuna.trial.FixedTrial({}), monitor="valid/accuracy", mode="max").requires
    (('valid', 'accuracy'),)
    """

    shapes_training = True

    loader_key = MonitorPart[str]("loader")
    metric_key = MonitorPart[str]("metric")
    minimize = MonitorPart[bool]("minimize")

    @accepts_old_names(ThreeArguments(), by_position=("loader_key", "metric_key", "minimize"))
    def __init__(self, trial: Any, *, monitor: str, mode: Mode | None = None) -> None:
        super().__init__(order=CallbackOrder.External)
        self.monitor = Monitor.of("OptunaPruningCallback", monitor, mode)
        if not callable(TrialMembers(trial).should_prune):
            raise TypeError(f"OptunaPruningCallback: trial must be an Optuna trial, got {trial!r}")
        study = TrialMembers(trial).study
        if study is None:
            self.monitor = self.monitor.directed("OptunaPruningCallback")
        else:
            minimize = study.direction.name == "MINIMIZE"
            if self.monitor.minimize not in (None, minimize):
                raise ValueError(
                    f"OptunaPruningCallback: mode={'max' if minimize else 'min'!r}, but the study's direction is "
                    f"{study.direction.name.lower()!r}"
                )
            self.monitor = replace(self.monitor, minimize=minimize)
        self.trial = trial
        self.requires = (self.monitor.pair,)

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
        best = TrialMembers(self.trial).best_score
        best = score if best is None or math.isnan(best) else best
        self.trial.best_score = min(best, score) if self.minimize else max(best, score)
        if self.trial.should_prune():
            optuna = importlib.import_module("optuna")
            raise optuna.TrialPruned(
                f"{self.metric_key} of {self.loader_key} is {score} after epoch {runner.epoch_step}"
            )
