"""Stochastic weight averaging: the mean of the weights at the ends of several epochs."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

from torch.optim.swa_utils import get_swa_multi_avg_fn

from runnerkit.callback import last_training_loader
from runnerkit.callbacks.training.parts.averaged_weights import AverageFn
from runnerkit.callbacks.training.parts.batch_norm import has_statistics, renew_statistics
from runnerkit.callbacks.training.parts.weight_average import WeightAverageCallback
from runnerkit.support.arguments import check_integers

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["SWACallback"]

logger = logging.getLogger(__name__)


class SWACallback(WeightAverageCallback):
    """Average the weights after the last training loader of each epoch from `start_epoch` on; the stage ends with the
    average as its model, with batch norm statistics recomputed by a pass over that loader.

    Use it with a constant learning rate, for example by the scheduler ``torch.optim.swa_utils.SWALR``.
    See arXiv:1803.05407.

    Args:
        start_epoch: first epoch of the stage to average, counted from 1.
        model_key: which model, if the runner has several; None averages each.
        validate: evaluate with the average; not for models with batch norm, whose statistics are only right at the end.

    >>> SWACallback(start_epoch=8).validate
    False
    """

    def __init__(self, start_epoch: int, *, model_key: str | None = None, validate: bool = False) -> None:
        super().__init__(model_key=model_key, validate=validate, use_buffers=False)
        check_integers(self, start_epoch=start_epoch)
        self.start_epoch = start_epoch

    def average_fn(self) -> AverageFn:
        return cast(AverageFn, get_swa_multi_avg_fn())

    def on_stage_start(self, runner: IRunner) -> None:
        super().on_stage_start(runner)
        if self.averages and runner.stage_epoch_len is not None and self.start_epoch > runner.stage_epoch_len:
            raise ValueError(f"start_epoch={self.start_epoch} exceeds the stage's {runner.stage_epoch_len} epochs")
        if self.validate and any(has_statistics(each.module) for each in self.averages.values()):
            raise ValueError(
                "SWACallback(validate=True) would evaluate averaged weights with batch norm statistics of other "
                "weights, since they are recomputed only at the end: leave out validate"
            )

    def on_loader_end(self, runner: IRunner) -> None:
        if runner.stage_epoch_step >= self.start_epoch and runner.loader_key == last_training_loader(runner.loaders):
            for each in self.averages.values():
                each.update()

    def on_stage_end(self, runner: IRunner) -> None:
        averaged = [each.module for each in self.averages.values() if each.num_averaged]
        if self.averages and not averaged:
            logger.warning("the stage ended before epoch %d: no weights were averaged", self.start_epoch)
        super().on_stage_end(runner)
        if any(map(has_statistics, averaged)):
            renew_statistics(runner, averaged, loader_key=last_training_loader(runner.loaders))
