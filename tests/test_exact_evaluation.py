"""Tests of exact evaluation: each sample counts once for any length, batch size and number of processes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.sampling.sharding import batches_of, shard_loader, start_epoch
from tests import exact_metrics_job
from tests.callbacks.exact_metrics import CASES, as_numpy, expected_of, make_samples
from tests.callbacks.run_ranks import run_ranks

# Reordered float64 sums of at most 200 terms differ by far less; any float32 step would cause errors near 1e-7.
TOLERANCE = {"rel": 1e-9, "abs": 1e-12, "nan_ok": True}

SETUPS = {
    "num_samples": st.integers(1, 200),
    "batch_size": st.integers(1, 33),
    "num_ranks": st.integers(1, 4),
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "seed": st.integers(0, 1000),
}


def due(order, *, batch_size, num_ranks, drop_last):
    """Return the samples, in the order of one process, that it would evaluate with the same global batch."""
    size = batch_size * num_ranks
    return order[: len(order) // size * size] if drop_last else order


def share_of(loader, *, rank, num_ranks):
    """Return the batches of one rank in the first epoch."""
    share = shard_loader(loader, key="valid", training=False, rank=rank, world_size=num_ranks, seed=42)
    start_epoch(share, 1)
    return list(batches_of(share))


def indices_of(batches):
    return [index for batch in batches for index in batch["index"].tolist()]


def loss_of(batch):
    return {"loss": nn.functional.cross_entropy(batch["logits"], batch["classes"])}


def mean_loss(samples):
    """Compute the mean cross-entropy of all samples in float64."""
    x = as_numpy(samples)
    return np.mean(np.log(np.exp(x["logits"]).sum(axis=1)) - x["logits"][np.arange(len(x["classes"])), x["classes"]])


def check(dtype, *, num_samples, batch_size, num_ranks, shuffle, drop_last, seed, num_workers=0):
    """Evaluate on all ranks and compare samples and metrics with those of a single pass over all samples."""
    samples = make_samples(num_samples, seed=seed, dtype=dtype) | {"index": torch.arange(num_samples)}
    options = {"shuffle": shuffle, "collate_fn": dl.TensorRows.collate}
    rows = dl.TensorRows(samples)
    loader = DataLoader(rows, batch_size=batch_size, drop_last=drop_last, num_workers=num_workers, **options)

    shares = [share_of(loader, rank=rank, num_ranks=num_ranks) for rank in range(num_ranks)]

    order = indices_of(share_of(DataLoader(rows, batch_size=7, **options), rank=0, num_ranks=1))
    expected = due(order, batch_size=batch_size, num_ranks=num_ranks, drop_last=drop_last)
    assert sorted(order) == list(range(num_samples))
    assert shuffle or order == sorted(order)
    assert sorted(index for batches in shares for index in indices_of(batches)) == sorted(expected)
    assert all(len(batch["index"]) < 2 * batch_size + 2 for batches in shares for batch in batches)
    if not expected:
        return
    check_metrics(shares, {key: each[expected] for key, each in samples.items()}, dtype=dtype)


def check_metrics(shares, samples, *, dtype):
    """Check that every rank has the metrics of all samples."""
    has_pairs = 0 < samples["is_query"].sum() < len(samples["index"])  # CMC needs both queries and a gallery
    cases = [name for name in CASES if name != "cmc" or has_pairs]
    del samples["index"]
    expected = expected_of(samples, cases)

    runners, counts, _ = run_ranks(shares, cases, batch_metrics=loss_of)

    assert counts == [len(samples["classes"])] * len(shares)
    for metrics in (runner.loader_metrics for runner in runners):
        assert metrics["loss"] == pytest.approx(mean_loss(samples), rel=1e-9 if dtype == torch.float64 else 1e-6)
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, **TOLERANCE)


@settings(max_examples=40, deadline=None)
@given(**SETUPS)
def test_evaluation_gives_the_numbers_of_all_samples_at_once(**setup):
    """Each sample is evaluated once, and metrics equal scikit-learn's or a plain float64 sum to nine digits.

    Covers short last batches, ranks without a batch and classes without a sample, for loss, accuracy, F1, AUC,
    confusion matrix, R2, retrieval and segmentation.
    """
    check(torch.float64, **setup)


@settings(max_examples=15, deadline=None)
@given(**SETUPS)
def test_evaluation_of_float32_values_is_as_exact_as_their_own_digits(**setup):
    """The mean of float32 losses is exact to 1e-6, and metrics that count or sort to nine digits."""
    check(torch.float32, **setup)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(**SETUPS, num_workers=st.integers(1, 2))
def test_evaluation_with_workers_gives_the_same(**setup):
    """Results do not change with one or two DataLoader workers per rank."""
    check(torch.float64, **setup)


@pytest.mark.slow
@pytest.mark.timeout(400)  # four processes, four times, on a busy machine
def test_the_same_experiment_on_one_to_four_processes():
    """Metrics after each of 3 epochs agree to 1e-6; only the summation order of float32 gradients differs.

    Batches of 12, 6, 4 and 3 samples per process give the global batch of 12. Training shuffles 246 samples, of which
    drop_last omits 6; evaluation has 151 samples.
    """
    results = exact_metrics_job.train_on_each((1, 2, 3, 4))

    one = results[1]
    assert one[3]["train"]["accuracy"] > 2 * one[1]["train"]["accuracy"], "the model must learn for this test to matter"
    for num_processes in (2, 3, 4):
        for epoch, loaders in one.items():
            for loader, metrics in loaders.items():
                assert results[num_processes][epoch][loader] == pytest.approx(metrics, rel=1e-6, abs=1e-6)
