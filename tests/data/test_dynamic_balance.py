"""Class sizes that become equal epoch by epoch."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.data import DynamicBalanceClassSampler
from tests.tiny import train

LABELS = [0] * 64 + [1] * 32 + [2] * 8


def counts(sampler):
    return Counter(LABELS[index] for index in sampler)


def test_sizes_follow_the_closed_form():
    """A class has min * (n / min) ** (lambda ** e) samples after e epochs, so the first epoch is the whole data set."""
    sampler = DynamicBalanceClassSampler(LABELS, exp_lambda=0.7, ignore_warning=True)

    assert counts(sampler) == {0: 64, 1: 32, 2: 8} and sorted(sampler) == list(range(104))
    for epoch in range(1, 30):
        sampler.set_epoch(epoch)
        expected = {0: round(8 * 8**0.7 ** (epoch - 1)), 1: round(8 * 4**0.7 ** (epoch - 1)), 2: 8}
        assert counts(sampler) == expected
        assert len(sampler) == sum(expected.values())
        assert max(Counter(sampler).values()) == 1, "classes shrink without repeating a sample"
    assert counts(sampler) == {0: 8, 1: 8, 2: 8}


def test_start_epoch_max_d_and_a_number_for_a_mode():
    """`start_epoch` skips epochs, `max_d` caps the ratio of class sizes, and `mode` sets the rarest class's size."""
    ahead = DynamicBalanceClassSampler(LABELS, exp_lambda=0.7, start_epoch=4, ignore_warning=True)
    fifth = DynamicBalanceClassSampler(LABELS, exp_lambda=0.7, ignore_warning=True)
    fifth.set_epoch(5)

    assert counts(ahead) == counts(fifth)
    assert counts(DynamicBalanceClassSampler(LABELS, max_d=3, ignore_warning=True)) == {0: 24, 1: 24, 2: 8}
    assert counts(DynamicBalanceClassSampler(LABELS, strategy=16, ignore_warning=True)) == {0: 128, 1: 64, 2: 16}


def test_a_run_counts_its_epochs():
    """The runner passes the epoch to the sampler, and the loader's length changes with it."""

    class Count(dl.Callback):
        samples = []

        def on_loader_end(self, runner):
            self.samples.append(runner.loader_sample_step)

    data = TensorDataset(torch.randn(104, 2), torch.tensor(LABELS))
    sampler = DynamicBalanceClassSampler(LABELS, exp_lambda=0.5, ignore_warning=True)
    count, batches = Count(), DataLoader(data, batch_size=8, sampler=sampler)

    train(nn.Linear(2, 3), loaders={"train": batches}, callbacks=[count], num_epochs=3)

    assert count.samples == [round(8 * 8**power) + round(8 * 4**power) + 8 for power in (1, 0.5, 0.25)]


def test_a_small_rarest_class_is_told(caplog):
    """A warning says that the last epochs are as small as the rarest class allows, unless it is turned off."""
    DynamicBalanceClassSampler(LABELS)
    assert "only 8 samples of each of the 3 classes;" in caplog.text

    caplog.clear()
    DynamicBalanceClassSampler(LABELS, ignore_warning=True)
    DynamicBalanceClassSampler(LABELS, strategy=100)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"exp_lambda": 1.0}, r"exp_lambda must be in \(0, 1\), got 1.0"),
        ({"start_epoch": -1}, "start_epoch must be >= 0, got -1"),
        ({"max_d": 0.5}, "max_d must be >= 1.* got 0.5"),
        ({"strategy": "upsampling"}, "strategy must be 'downsampling' or a number .* got 'upsampling'"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    """The error states the allowed values."""
    with pytest.raises(ValueError, match=message):
        DynamicBalanceClassSampler(LABELS, **arguments)
