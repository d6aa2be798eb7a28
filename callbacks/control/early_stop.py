"""Early stopping: end the stage when a metric no longer improves."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runnerkit.callback import CallbackOrder, IStoppingCallback
from runnerkit.errors import UnknownKeyError
from runnerkit.monitor import Mode, Monitor, MonitorPart, ThreeArguments
from runnerkit.support.arguments import check_integers, check_numbers
from runnerkit.support.deprecation import accepts_old_names
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["EarlyStoppingCallback"]


class EarlyStoppingCallback(IStoppingCallback):
    """End the stage after `patience` consecutive epochs without improvement.

    Epochs in which the loader did not run are not counted; NaN is never an improvement. To continue a run that was
    stopped early, resume it with a larger `patience` or without this callback.

    Args:
        patience: number of epochs, >= 1.
        monitor: the metric to watch, such as "valid/loss".
        mode: whether smaller ("min") or larger ("max") values are better; may be left out for a loss.
        min_delta: smallest change that counts as an improvement, >= 0.

    >>> EarlyStoppingCallback(patience=3, monitor="valid/loss", mode="min").requires
    (('valid', 'loss'),)
    """

    loader_key = MonitorPart[str]("loader")
    metric_key = MonitorPart[str]("metric")
    minimize = MonitorPart[bool]("minimize")

    @accepts_old_names(ThreeArguments(), by_position=("loader_key", "metric_key", "minimize", "min_delta"))
    def __init__(self, patience: int, *, monitor: str, mode: Mode | None = None, min_delta: float = 1e-6) -> None:
        # Before the checkpoint of the same epoch, whose saved count must include this epoch.
        super().__init__(order=CallbackOrder.Scheduler + 5)
        check_integers(self, patience=patience)
        check_numbers(self, least=0, min_delta=min_delta)
        self.patience = patience
        self.monitor = Monitor.of("EarlyStoppingCallback", monitor, mode).directed("EarlyStoppingCallback")
        self.min_delta = min_delta
        self.requires = (self.monitor.pair,)
        self.best_score: float | None = None
        self.best_epoch: int | None = None
        self.num_bad_epochs = 0

    def on_stage_start(self, runner: IRunner) -> None:
        self.best_score, self.best_epoch, self.num_bad_epochs = None, None, 0

    def on_epoch_end(self, runner: IRunner) -> None:
        metrics = runner.epoch_metrics.get(self.loader_key)
        if metrics is None:
            return
        if self.metric_key not in metrics:
            raise UnknownKeyError(
                f"{type(self).__name__} watches metric {self.metric_key!r} of loader {self.loader_key!r}, which has "
                f"only {sorted(metrics)}"
            )
        score = metrics[self.metric_key]
        if self._is_better(score):
            self.best_score, self.num_bad_epochs = score, 0
            self.best_epoch = runner.epoch_step
        else:
            self.num_bad_epochs += 1
        if self.has_stopped:
            runner.current_run.logs.notice(runner, self._why(runner))
            runner.need_early_stop = True

    def _why(self, runner: IRunner) -> str:
        watched, num = f"{self.metric_key} of {self.loader_key}", self.num_bad_epochs
        epochs = f"for {num} epoch{'s' * (num != 1)}"
        if self.best_score is None:
            why = f"{watched} was not a number {epochs}"
        else:
            best = f"its best is {self.best_score:.4g}" + (f", epoch {self.best_epoch}" if self.best_epoch else "")
            why = f"{watched} has not improved {epochs}; {best}"
        return f"stopped early after epoch {runner.epoch_step}: {why}"

    @property
    def has_stopped(self) -> bool:  # type: ignore[override]  # read only
        return self.num_bad_epochs >= self.patience

    def _is_better(self, score: float) -> bool:
        if self.best_score is None:
            return not math.isnan(score)
        gain = self.best_score - score if self.minimize else score - self.best_score
        return gain > self.min_delta

    def state_dict(self) -> StateDict:
        return {"best_score": self.best_score, "best_epoch": self.best_epoch, "num_bad_epochs": self.num_bad_epochs}

    def load_state_dict(self, state: StateDict) -> None:
        self.best_score, self.num_bad_epochs = state["best_score"], state["num_bad_epochs"]
        self.best_epoch = state.get("best_epoch")  # absent before 0.2
