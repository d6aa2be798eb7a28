"""Exact evaluation: whatever the length, the batch size and the number of processes, each sample counts once."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from runnerkit.metrics import LoaderMeans, accuracy
from runnerkit.sharding import batches_of, shard_loader
from tests import exact_metrics_job
from tests.tiny import NUM_CLASSES

LENGTHS = st.integers(1, 200)
BATCH_SIZES = st.integers(1, 33)
WORLD_SIZES = st.integers(1, 4)


def visited(data, *, batch_size, world_size, shuffle, drop_last, num_workers=0):
    """The batches that each rank evaluates."""
    whole = DataLoader(data, batch_size=batch_size, shuffle=shuffle, drop_last=drop_last, num_workers=num_workers)
    ranks = []
    for rank in range(world_size):
        shard = shard_loader(whole, key="valid", training=False, rank=rank, world_size=world_size, seed=42)
        shard.batch_sampler.set_epoch(1)
        ranks.append(list(batches_of(shard)))
    return ranks


def numbered(num_samples):
    return TensorDataset(torch.arange(num_samples))


def check_visits(num_samples, batch_size, world_size, shuffle, drop_last, num_workers=0):
    ranks = visited(
        numbered(num_samples),
        batch_size=batch_size,
        world_size=world_size,
        shuffle=shuffle,
        drop_last=drop_last,
        num_workers=num_workers,
    )

    seen = sorted(index for batches in ranks for (batch,) in batches for index in batch.tolist())
    if drop_last:  # whole global batches only, of which each sample at most once
        size = batch_size * world_size
        assert len(set(seen)) == len(seen) == num_samples // size * size
        assert shuffle or seen == list(range(len(seen)))
    else:
        assert seen == list(range(num_samples))
    return ranks


@settings(deadline=None, max_examples=200)
@given(LENGTHS, BATCH_SIZES, WORLD_SIZES, st.booleans(), st.booleans())
def test_evaluation_visits_each_index_exactly_once(num_samples, batch_size, world_size, shuffle, drop_last):
    """None padded, none left out; with drop_last all but what does not fill a batch of all processes."""
    check_visits(num_samples, batch_size, world_size, shuffle, drop_last)


@pytest.mark.slow
@settings(deadline=None, max_examples=6)
@given(LENGTHS, BATCH_SIZES, WORLD_SIZES, st.booleans(), st.booleans(), st.integers(1, 2))
def test_workers_change_nothing(num_samples, batch_size, world_size, shuffle, drop_last, num_workers):
    """The same batches in the same order come out of one or two processes of a loader, and out of none."""
    arguments = num_samples, batch_size, world_size, shuffle, drop_last

    with_workers = check_visits(*arguments, num_workers=num_workers)

    assert str(with_workers) == str(check_visits(*arguments))


@settings(deadline=None, max_examples=100)
@given(LENGTHS, BATCH_SIZES, WORLD_SIZES, st.booleans(), st.integers(0, 2**31))
def test_means_over_processes_are_means_over_samples(num_samples, batch_size, world_size, shuffle, seed):
    """Loss and top-k accuracy equal numpy's on the whole data set in float64, to 1e-12."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_samples, NUM_CLASSES, generator=generator, dtype=torch.float64)
    targets = torch.randint(NUM_CLASSES, (num_samples,), generator=generator)
    data = TensorDataset(logits, targets)
    sums = {"loss": 0.0, "accuracy01": 0.0, "accuracy02": 0.0}

    count = 0
    for batches in visited(data, batch_size=batch_size, world_size=world_size, shuffle=shuffle, drop_last=False):
        means = LoaderMeans()
        for rows, labels in batches:
            first, second = accuracy(rows, labels, topk=(1, 2))
            loss = torch.nn.functional.cross_entropy(rows, labels)
            means.update({"loss": loss, "accuracy01": first, "accuracy02": second}, len(rows))
        for name, (total, _) in means.totals().items():
            sums[name] += total
        count += means.num_samples

    rows, labels = logits.numpy(), targets.numpy()
    of_target = rows[np.arange(num_samples), labels]
    num_above = (rows > of_target[:, None]).sum(axis=1)
    expected = {
        "loss": (np.log(np.exp(rows).sum(axis=1)) - of_target).mean(),
        "accuracy01": (num_above < 1).mean(),
        "accuracy02": (num_above < 2).mean(),
    }
    assert count == num_samples
    assert {name: total / count for name, total in sums.items()} == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(400)  # four processes, four times, whatever else the machine does
def test_the_same_experiment_on_one_to_four_processes():
    """Equal metrics after each of 3 epochs, to 1e-6: the order in which float32 gradients add up is all that differs.

    Batches of 12, 6, 4 and 3 samples a process are one global batch of 12. Shuffled; 246 samples to train on, of which
    drop_last leaves 6 out; 151 to evaluate on.
    """
    results = exact_metrics_job.train_on_each((1, 2, 3, 4))

    one = results[1]
    assert one[3]["train"]["accuracy"] > 2 * one[1]["train"]["accuracy"], "it learns, else equality would mean little"
    for num_processes in (2, 3, 4):
        for epoch, loaders in one.items():
            for loader, metrics in loaders.items():
                assert results[num_processes][epoch][loader] == pytest.approx(metrics, rel=1e-6, abs=1e-6)
