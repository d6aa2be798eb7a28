"""Loaders that run only every few epochs."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.loop.checks import check_loader_key
from runnerkit.monitor import Mode, Monitor, MonitorPart, ThreeArguments
from runnerkit.support.deprecation import accepts_old_names

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["PeriodicLoaderCallback"]


class PeriodicLoaderCallback(Callback):
    """Run a loader only every few epochs of the stage; a loader without a period runs in every epoch.

    In the other epochs ``runner.epoch_metrics`` lacks an entry for it, so early stopping and checkpoints skip them.

    Args:
        monitor: the metric that selects the best epoch, such as "valid/loss"; checked to exist before training.
        mode: whether smaller ("min") or larger ("max") values are better; may be left out for a loss. It is kept in the
            attribute `monitor`.
        loader_periods: {loader key: period in epochs}; 0 means never, and is not allowed for the monitor's loader.

    >>> PeriodicLoaderCallback(monitor="valid/loss", mode="min", valid=3).loader_periods
    {'valid': 3}
    """

    shapes_training = True

    valid_loader_key = MonitorPart[str]("loader")
    valid_metric_key = MonitorPart[str]("metric")
    minimize = MonitorPart[bool]("minimize")

    @accepts_old_names(
        ThreeArguments("valid_loader_key", "valid_metric_key", minimize_default=True),
        by_position=("valid_loader_key", "valid_metric_key", "minimize"),
    )
    def __init__(self, *, monitor: str, mode: Mode | None = None, **loader_periods: int) -> None:
        # First of all callbacks: the others see at an epoch's start the loaders that will run.
        super().__init__(order=CallbackOrder.Internal)
        selects = Monitor.of("PeriodicLoaderCallback", monitor, mode).directed("PeriodicLoaderCallback")
        self.monitor = selects.among(loader_periods)
        for key, period in loader_periods.items():
            if not isinstance(period, Real) or not period >= 0 or period % 1:
                raise (ValueError if isinstance(period, Real) else TypeError)(
                    f"PeriodicLoaderCallback: the period of loader {key!r} must be a number of epochs >= 0, got "
                    f"{period!r}"
                )
        if loader_periods.get("train", 1) != 1:
            raise ValueError(
                f"PeriodicLoaderCallback: loader 'train' runs in every epoch; its period must be 1, got "
                f"{loader_periods['train']}"
            )
        if loader_periods.get(self.monitor.loader) == 0:
            raise ValueError(
                f"PeriodicLoaderCallback: loader {self.monitor.loader!r} selects the best epoch, so its period must be "
                ">= 1, got 0"
            )
        self.loader_periods = {key: int(period) for key, period in loader_periods.items()}
        self.requires = (self.monitor.pair,)
        self._order: list[str] = []
        self._skipped: dict[str, Any] = {}

    def on_stage_start(self, runner: IRunner) -> None:
        for key in self.loader_periods:
            check_loader_key(key, runner.loaders, reader=type(self).__name__)
        self._skipped = {}

    def on_epoch_start(self, runner: IRunner) -> None:
        epoch = runner.stage_epoch_step
        self._order = list(runner.loaders)
        self._skipped = {key: loader for key, loader in runner.loaders.items() if not self._is_due(key, epoch)}
        if len(self._skipped) == len(runner.loaders):
            raise ValueError(f"no loader runs in epoch {epoch} with the periods {self.loader_periods}")
        runner.loaders = {key: loader for key, loader in runner.loaders.items() if key not in self._skipped}
        runner.current_run.stage.left_out_loaders = self._skipped

    def on_epoch_end(self, runner: IRunner) -> None:
        # By key, to keep the loaders that other callbacks have replaced.
        loaders = runner.loaders | self._skipped
        runner.loaders = {key: loaders[key] for key in self._order}
        runner.current_run.stage.left_out_loaders = self._skipped = {}

    def _is_due(self, key: str, epoch: int) -> bool:
        period = self.loader_periods.get(key, 1)
        return period > 0 and epoch % period == 0
