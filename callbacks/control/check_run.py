"""Short runs that visit every loader, to check that training works at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.support.arguments import check_integers

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["CheckRunCallback"]


class CheckRunCallback(Callback):
    """End each loader after a few batches, and the stage after a few epochs.

    Args:
        num_batch_steps: number of batches of each loader, per process, >= 1.
        num_epoch_steps: number of epochs of the stage, >= 1.

    >>> CheckRunCallback(num_batch_steps=2).num_batch_steps
    2
    """

    shapes_training = True

    def __init__(self, num_batch_steps: int = 3, num_epoch_steps: int = 3) -> None:
        super().__init__(order=CallbackOrder.External)
        check_integers(self, num_batch_steps=num_batch_steps, num_epoch_steps=num_epoch_steps)
        self.num_batch_steps = num_batch_steps
        self.num_epoch_steps = num_epoch_steps

    def on_batch_end(self, runner: IRunner) -> None:
        if runner.loader_batch_step >= self.num_batch_steps:
            runner.need_early_stop = True  # ends this loader only: the runner resets it for the next one

    def on_epoch_end(self, runner: IRunner) -> None:
        if runner.stage_epoch_step >= self.num_epoch_steps:
            runner.need_early_stop = True
