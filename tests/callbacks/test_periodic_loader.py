"""A loader with a period n runs in every n-th epoch."""

import pytest
import torch
from torch import nn

from runnerkit.callbacks.control.early_stop import EarlyStoppingCallback
from runnerkit.callbacks.control.periodic_loader import PeriodicLoaderCallback
from runnerkit.engines import CPUEngine
from runnerkit.runner import IRunner

KEYS = ("train", "train_more", "valid", "valid_more")


class PeriodicRunner(IRunner):
    """A runner that logs the epoch as its only metric and records the epochs of each loader."""

    def __init__(self, *callbacks, num_epochs=7):
        super().__init__(nn.Linear(1, 1), CPUEngine())
        self._given, self.num_epochs = callbacks, num_epochs
        self.ran = {key: [] for key in KEYS}
        self.orders = []

    def get_stage_len(self, stage):
        return self.num_epochs

    def get_loaders(self, stage):
        return {key: [torch.zeros(2, 1)] for key in KEYS}

    def get_callbacks(self, stage):
        return {str(position): callback for position, callback in enumerate(self._given)}

    def on_epoch_end(self, runner):
        self.orders.append(tuple(self.loaders))

    def handle_batch(self, batch):
        if self.epoch_step:  # epoch 0 is the check before training
            self.ran[self.loader_key].append(self.epoch_step)
        self.batch_metrics["epoch"] = float(self.epoch_step)


def test_loaders_run_in_their_epochs():
    """A loader without a period runs in each epoch, and one with period 0 never."""
    callback = PeriodicLoaderCallback("valid", "epoch", minimize=True, train_more=2, valid=3, valid_more=0)

    runner = PeriodicRunner(callback).run()

    assert runner.ran == {"train": [*range(1, 8)], "train_more": [2, 4, 6], "valid": [3, 6], "valid_more": []}
    assert set(runner.experiment_metrics[1]) == {"train"}
    assert set(runner.experiment_metrics[6]) == {"train", "train_more", "valid"}


def test_loaders_are_put_back_in_their_order():
    """All loaders are back in the next epoch."""
    runner = PeriodicRunner(PeriodicLoaderCallback("valid", "epoch", train_more=2, valid=3)).run()

    assert runner.orders == [KEYS] * 7


def test_early_stopping_passes_over_epochs_without_the_loader():
    """Patience counts only epochs in which the metric was measured."""
    stop = EarlyStoppingCallback(2, "valid", "epoch", minimize=True)

    runner = PeriodicRunner(PeriodicLoaderCallback("valid", "epoch", valid=2), stop, num_epochs=20).run()

    assert runner.ran["valid"] == [2, 4, 6]
    assert runner.epoch_step == 6


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        ({"valid_more": -1}, "the period of loader 'valid_more' must be a number of epochs >= 0, got -1"),
        ({"valid_more": 1.5}, "the period of loader 'valid_more' must be a number of epochs >= 0, got 1.5"),
        ({"train": 2}, "loader 'train' runs in every epoch; its period must be 1, got 2"),
        ({"valid": 0}, "loader 'valid' selects the best epoch, so its period must be >= 1, got 0"),
    ],
)
def test_bad_period_is_refused(periods, message):
    """The error is raised before training."""
    with pytest.raises(ValueError, match=message):
        PeriodicLoaderCallback("valid", "epoch", **periods)


def test_misspelt_loader_is_refused():
    """Otherwise the loader would run in every epoch."""
    with pytest.raises(ValueError, match=r"there is no loader 'vaild'; the loaders are \['train', 'train_more', "):
        PeriodicRunner(PeriodicLoaderCallback("valid", "epoch", vaild=2)).run()


def test_epoch_without_any_loader_is_refused():
    """An epoch without loaders would do nothing."""

    class OnlyMore(PeriodicRunner):
        def get_loaders(self, stage):
            return {"valid": [torch.zeros(2, 1)]}

    with pytest.raises(ValueError, match=r"no loader runs in epoch 1 with the periods \{'valid': 2\}"):
        OnlyMore(PeriodicLoaderCallback("valid", "epoch", valid=2)).run()
