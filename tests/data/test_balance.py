"""Samplers that balance classes: samples per class, and one order for all processes."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from runnerkit.data import BalanceClassSampler, BatchBalanceClassSampler
from runnerkit.sampling.indexed.sampler import seeded_order
from runnerkit.sampling.sharding import batches_of
from tests.data.places import flat, share

LABELS = [0] * 50 + [1] * 20 + [2] * 5
CHI_SQUARE_999 = {2: 13.82, 9: 27.88, 49: 85.35}  # 99.9 % quantile by degrees of freedom, from a table
NUMBER_OR_NONE = st.one_of(st.none(), st.integers(1, 9))


def labels_of(indices, labels=LABELS):
    return Counter(labels[index] for index in indices)


def chi_square(counts, expected):
    return sum((count - expected) ** 2 / expected for count in counts)


@settings(deadline=None, max_examples=50)
@given(
    sizes=st.lists(st.integers(1, 20), min_size=1, max_size=5),
    strategy=st.one_of(st.sampled_from(["downsampling", "upsampling"]), st.integers(1, 40)),
)
def test_classes_are_equal_and_a_class_is_used_evenly(sizes, strategy):
    """Each class has the same number of samples, and samples of a class differ by at most one in how often they are
    drawn."""
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    sampler = BalanceClassSampler(labels, strategy=strategy)

    indices = list(sampler)

    per_class = {"downsampling": min(sizes), "upsampling": max(sizes)}.get(strategy, strategy)
    assert labels_of(indices, labels) == dict.fromkeys(range(len(sizes)), per_class)
    assert len(sampler) == len(indices) == per_class * len(sizes)
    drawn = Counter(indices)
    for label in range(len(sizes)):
        times = [drawn[index] for index in range(len(labels)) if labels[index] == label]
        assert max(times) - min(times) <= 1


def test_each_sample_of_a_class_is_drawn_as_often_as_another():
    """Over 500 epochs that draw 5 of 50, samples are equally likely: a chi-square test at 0.1 %, with a fixed seed."""
    sampler = BalanceClassSampler(LABELS)

    drawn = Counter(index for seed in range(500) for index in seeded_order(sampler, seed))

    # Samples are drawn without replacement, so the statistic is (1 - 5 / 50) times chi-square's, and the bound holds.
    assert chi_square([drawn[index] for index in range(50)], 500 * 5 / 50) < CHI_SQUARE_999[49]
    assert {drawn[index] for index in range(70, 75)} == {500}


def test_the_order_is_shuffled_over_classes():
    """Each of three classes comes first in a third of the epochs: a chi-square test at 0.1 %, with fixed seeds."""
    sampler = BalanceClassSampler(LABELS, strategy=5)

    first = Counter(LABELS[seeded_order(sampler, seed)[0]] for seed in range(600))

    assert chi_square([first[label] for label in range(3)], 200) < CHI_SQUARE_999[2]


@pytest.mark.parametrize("labels", [np.array(LABELS), torch.tensor(LABELS), [str(label) for label in LABELS]])
def test_labels_may_be_an_array_a_tensor_or_strings(labels):
    """The order equals that for a list of ints."""
    assert seeded_order(BalanceClassSampler(labels), 1) == seeded_order(BalanceClassSampler(LABELS), 1)


@pytest.mark.parametrize("world_size", [2, 3])
def test_processes_share_one_balanced_epoch(world_size):
    """Each process draws the same order and takes its shard; the shards together equal one process's epoch."""
    data = TensorDataset(torch.arange(75))
    loader = DataLoader(data, batch_size=4, sampler=BalanceClassSampler(LABELS, strategy="upsampling"))

    def indices(rank, size):
        torch.rand(rank)  # global generators differ between processes
        return flat(batch[0].tolist() for batch in share(loader, rank, size, epoch=3))

    together = sorted(flat(indices(rank, world_size) for rank in range(world_size)))
    assert together == sorted(indices(0, 1))
    assert set(labels_of(together).values()) == {50}


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 9), min_size=3, max_size=6), st.integers(1, 3), st.integers(1, 12), NUMBER_OR_NONE)
def test_each_batch_has_so_many_of_so_many_classes(sizes, num_classes, num_samples, num_batches):
    """Within a class, no sample repeats before all were taken."""
    labels = [label for label, size in enumerate(sizes) for _ in range(size)]
    sampler = BatchBalanceClassSampler(labels, num_classes, num_samples, num_batches)

    batches = list(sampler)

    assert len(batches) == len(sampler) == (num_batches or max(1, len(labels) // (num_classes * num_samples)))
    for batch in batches:
        counts = labels_of(batch, labels)
        assert len(batch) == sampler.batch_size
        assert len(counts) == num_classes and set(counts.values()) == {num_samples}
        for label in counts:
            times = Counter(index for index in batch if labels[index] == label)
            assert max(times.values()) - min(times.get(i, 0) for i in range(len(labels)) if labels[i] == label) <= 1


def test_each_class_is_in_as_many_batches_as_another():
    """5 of 10 classes in 2,000 batches are equally likely: a chi-square test at 0.1 %, with a fixed seed."""
    sampler = BatchBalanceClassSampler(list(range(10)) * 4, num_classes=5, num_samples=2, num_batches=2000)

    batches = seeded_order(sampler, 3)

    classes = Counter(index % 10 for batch in batches for index in batch[::2])
    assert chi_square([classes[label] for label in range(10)], 1000) < CHI_SQUARE_999[9]


def test_processes_share_batches_whole():
    """Of 7 batches, two processes train on 4 and 3 whole ones; the second repeats its last, which counts nothing."""
    sampler = BatchBalanceClassSampler(LABELS, num_classes=2, num_samples=3, num_batches=7)
    loader = DataLoader(TensorDataset(torch.arange(75)), batch_sampler=sampler)

    def batches(rank, size):
        return [batch[0].tolist() for batch in batches_of(share(loader, rank, size))]

    one, first, second = batches(0, 1), batches(0, 2), batches(1, 2)
    assert first == one[0::2] and second == [*one[1::2], one[5]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BalanceClassSampler([]), r"one label per sample.*got shape \(0,\)"),
        (lambda: BalanceClassSampler([[0, 1]]), r"one label per sample.*got shape \(1, 2\)"),
        (
            lambda: BalanceClassSampler(LABELS, strategy="up"),
            "strategy must be 'downsampling', 'upsampling' or .* got 'up'",
        ),
        (lambda: BalanceClassSampler(LABELS, strategy=0), "strategy must be .* got 0"),
        (lambda: BatchBalanceClassSampler(LABELS, 4, 1), r"num_classes must be in \[1, 3\].* got 4"),
        (lambda: BatchBalanceClassSampler(LABELS, 0, 1), r"num_classes must be in \[1, 3\].* got 0"),
        (lambda: BatchBalanceClassSampler(LABELS, 2, 0), "num_samples must be >= 1, got 0"),
        (lambda: BatchBalanceClassSampler(LABELS, 2, 1, 0), "num_batches must be >= 1, got 0"),
    ],
)
def test_bad_input_is_refused(make, message):
    """The error states the allowed values."""
    with pytest.raises(ValueError, match=message):
        make()
