"""Loaders that run only every few epochs."""

from __future__ import annotations

from numbers import Real
from typing import TYPE_CHECKING, Any

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.loop.checks import check_loader_key
from runnerkit.support.arguments import check_strings

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["PeriodicLoaderCallback"]


class PeriodicLoaderCallback(Callback):
    """Run a loader only every few epochs of the stage; a loader without a period runs in every epoch.

    In the other epochs ``runner.epoch_metrics`` lacks an entry for it, so early stopping and checkpoints skip them.

    Args:
        valid_loader_key, valid_metric_key: the metric that selects the best epoch; checked to exist before training.
        minimize: whether smaller values are better; kept as an attribute.
        loader_periods: {loader key: period in epochs}; 0 means never, and is not allowed for `valid_loader_key`.

    >>> PeriodicLoaderCallback("valid", "loss", minimize=True, valid=3).loader_periods
    {'valid': 3}
    """

    shapes_training = True

    def __init__(
        self, valid_loader_key: str, valid_metric_key: str, minimize: bool = True, **loader_periods: int
    ) -> None:
        # First of all callbacks: the others see at an epoch's start the loaders that will run.
        super().__init__(order=CallbackOrder.Internal)
        check_strings(self, valid_loader_key=valid_loader_key, valid_metric_key=valid_metric_key)
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
        if loader_periods.get(valid_loader_key) == 0:
            raise ValueError(
                f"PeriodicLoaderCallback: loader {valid_loader_key!r} selects the best epoch, so its period must be "
                ">= 1, got 0"
            )
        self.valid_loader_key, self.valid_metric_key = valid_loader_key, valid_metric_key
        self.minimize = minimize
        self.loader_periods = {key: int(period) for key, period in loader_periods.items()}
        self.requires = ((valid_loader_key, valid_metric_key),)
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

    def on_epoch_end(self, runner: IRunner) -> None:
        # By key, to keep the loaders that other callbacks have replaced.
        loaders = runner.loaders | self._skipped
        runner.loaders = {key: loaders[key] for key in self._order}
        self._skipped = {}

    def _is_due(self, key: str, epoch: int) -> bool:
        period = self.loader_periods.get(key, 1)
        return period > 0 and epoch % period == 0
