"""A short run that goes through every loader: does it work at all?"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerkit.arguments import check_integers
from runnerkit.callback import Callback, CallbackOrder

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class CheckRunCallback(Callback):
    """End each loader after some batches, and the stage after some epochs.

    Args:
        num_batch_steps: batches of each loader, in each process, >= 1.
        num_epoch_steps: epochs of the stage, >= 1.

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
            runner.need_early_stop = True  # of this loader only: the runner clears it for the next

    def on_epoch_end(self, runner: IRunner) -> None:
        if runner.stage_epoch_step >= self.num_epoch_steps:
            runner.need_early_stop = True
