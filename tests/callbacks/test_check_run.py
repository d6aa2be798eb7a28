"""A check run uses every loader and is short."""

import pytest
import torch
from torch import nn

from runnerkit.callbacks.control.check_run import CheckRunCallback
from runnerkit.engines import CPUEngine
from runnerkit.runner import IRunner


class CountingRunner(IRunner):
    """A runner that counts the batches of each loader and epoch."""

    def __init__(self, callback):
        super().__init__(nn.Linear(1, 1), CPUEngine())
        self.callback = callback
        self.counts = {}

    def get_stage_len(self, stage):
        return 7

    def get_loaders(self, stage):
        return {"train": [torch.zeros(2, 1)] * 10, "valid": [torch.zeros(2, 1)] * 2, "valid_2": [torch.zeros(2, 1)] * 5}

    def get_callbacks(self, stage):
        return {"check": self.callback}

    def handle_batch(self, batch):
        key = self.epoch_step, self.loader_key
        self.counts[key] = self.counts.get(key, 0) + 1


def test_every_loader_runs_for_some_batches_and_the_stage_for_some_epochs():
    """Ending the training loader early does not end the validation after it."""
    runner = CountingRunner(CheckRunCallback(num_batch_steps=3, num_epoch_steps=2)).run()

    expected = {"train": 3, "valid": 2, "valid_2": 3}
    assert runner.counts == {(epoch, key): count for epoch in (1, 2) for key, count in expected.items()}


def test_three_epochs_of_three_batches_are_the_default():
    """The defaults are those of `train(check=True)`."""
    runner = CountingRunner(CheckRunCallback()).run()

    assert {key: count for key, count in runner.counts.items() if key[1] == "train"} == {
        (epoch, "train"): 3 for epoch in (1, 2, 3)
    }


@pytest.mark.parametrize("arguments", [{"num_batch_steps": 0}, {"num_epoch_steps": 0}])
def test_a_check_of_nothing_is_refused(arguments):
    """A check without batches or epochs would always pass."""
    with pytest.raises(ValueError, match=r"CheckRunCallback: num_.*_steps must be >= 1, got"):
        CheckRunCallback(**arguments)
