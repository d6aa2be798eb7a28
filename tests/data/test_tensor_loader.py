"""Tensors in memory: the batches of a DataLoader, at the cost of indexing."""

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.data import BatchLimitLoaderWrapper, TensorLoader, TensorRows
from tests import tiny
from tests.data.places import share
from tests.interrupt import Interrupt
from tests.tiny import classification, mlp, weights


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 4), st.booleans(), st.booleans(), st.booleans())
def test_its_batches_are_those_of_a_data_loader(num_samples, batch_size, world_size, shuffle, drop_last, training):
    """Batches agree bit for bit on every rank and in every epoch."""
    features, targets = torch.randn(num_samples, 2, 3), torch.arange(num_samples)
    arguments = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last}
    ours = TensorLoader(features, targets, **arguments)
    torchs = DataLoader(TensorDataset(features, targets), **arguments)

    for rank in range(world_size):
        for epoch in (1, 2):
            shard = share(ours, rank, world_size, training=training, epoch=epoch)
            expected = list(share(torchs, rank, world_size, training=training, epoch=epoch))
            got = list(shard)
            assert len(shard) == len(got) == len(expected)
            for batch, reference in zip(got, expected, strict=True):
                assert all(torch.equal(one, other) for one, other in zip(batch, reference, strict=True))


def test_a_dict_of_tensors_gives_dicts():
    """Batches have the dict's keys; without an engine, torch's generator shuffles them."""
    loader = TensorLoader({"x": torch.arange(10), "y": torch.arange(10) ** 2}, batch_size=4, shuffle=True)

    passes = [list(loader), list(loader)]

    for batches in passes:
        assert [sorted(batch) for batch in batches] == [["x", "y"]] * 3
        assert all(torch.equal(batch["x"] ** 2, batch["y"]) for batch in batches)
        assert sorted(torch.cat([batch["x"] for batch in batches]).tolist()) == list(range(10))
    assert not torch.equal(passes[0][0]["x"], passes[1][0]["x"])
    assert len(loader) == 3 and loader.batch_size == 4 and len(loader.dataset) == 10


def test_a_batch_is_a_copy():
    """Changing a batch in place does not change the data."""
    data = torch.zeros(4, 2)

    for (batch,) in TensorLoader(data, batch_size=2):
        batch.add_(1)

    assert data.sum() == 0


@pytest.mark.parametrize("num_workers", [0, 1])
def test_rows_fetch_batches_for_a_data_loader(num_workers):
    """With and without workers, batches equal TensorDataset's."""
    features, targets = classification(11).tensors
    rows = TensorRows(features, targets)

    ours = list(DataLoader(rows, batch_size=4, num_workers=num_workers, collate_fn=TensorRows.collate))

    expected = list(DataLoader(TensorDataset(features, targets), batch_size=4))
    for batch, reference in zip(ours, expected, strict=True):
        assert torch.equal(batch[0], reference[0]) and torch.equal(batch[1], reference[1])
    assert torch.equal(rows[3][0], features[3])


def test_a_loader_travels_and_moves_its_tensors_where_it_arrives():
    """A pickled loader uses its device only when the first batch is requested in the other process."""
    loader = TensorLoader(torch.arange(6), batch_size=2, device="meta")

    arrived = pickle.loads(pickle.dumps(loader))

    assert next(iter(arrived))[0].device == torch.device("meta")
    assert arrived.dataset.device == torch.device("meta")


def train(logdir, make_loader, *callbacks, dropout=0.3, **options):
    data = {
        "train": make_loader(*classification(43).tensors, batch_size=4, shuffle=True),
        "valid": make_loader(*classification(21).tensors, batch_size=4),
    }
    save, metric = (
        dl.CheckpointCallback(logdir, content="runner", every_steps=2),
        dl.AccuracyCallback("logits", "targets"),
    )
    options |= {"callbacks": [save, metric, *callbacks], "num_epochs": 3, "logdir": logdir}
    return tiny.train(mlp(dropout=dropout), loaders=data, **options)


def data_loader(*tensors, **arguments):
    return DataLoader(TensorDataset(*tensors), **arguments)


def test_a_run_resumed_within_an_epoch_equals_the_uninterrupted_one(tmp_path):
    """Weights and metrics are equal bit for bit, with dropout."""
    expected = train(tmp_path / "whole", TensorLoader)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", TensorLoader, Interrupt(9))

    resumed = train(tmp_path / "broken", TensorLoader, resume="auto")

    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics


def test_two_processes_interrupted_within_an_epoch_equal_one_with_a_data_loader(tmp_path):
    """Two processes, interrupted and resumed, match one process that trains on the first 4 batches of 8.

    One test covers sharding, limit and resume, because processes are slow to start. The tolerance is 1e-6: two
    processes sum in another order.
    """

    def limited(make, batch_size):
        return lambda *tensors, **arguments: BatchLimitLoaderWrapper(
            make(*tensors, **{**arguments, "batch_size": batch_size}), 4
        )

    expected = train(tmp_path / "torch", limited(data_loader, 8), dropout=0.0)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "ours", limited(TensorLoader, 4), Interrupt(9), dropout=0.0, num_processes=2)

    resumed = train(tmp_path / "ours", limited(TensorLoader, 4), dropout=0.0, num_processes=2, resume="auto")

    torch.testing.assert_close(weights(resumed.model), weights(expected.model), rtol=1e-6, atol=1e-6)
    for epoch, loaders in expected.experiment_metrics.items():
        for key, metrics in loaders.items():
            assert resumed.experiment_metrics[epoch][key] == pytest.approx(metrics, rel=1e-6)
    assert resumed.batch_step == 3 * 4


def test_batches_come_at_the_price_of_indexing():
    """A pass of ten batches calls as many torch functions for a thousand samples per batch as for ten."""

    class Count(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    def num_calls(num_samples, batch_size):
        loader = TensorLoader(torch.zeros(num_samples, 3), torch.zeros(num_samples), batch_size=batch_size)
        with Count() as count:
            list(loader)
        return count.calls

    calls = [num_calls(100 * factor, 10 * factor) for factor in (1, 10, 100)]
    assert calls[0] == calls[1] == calls[2]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorLoader(batch_size=1), ValueError, "no tensors"),
        (lambda: TensorLoader({}, batch_size=1), ValueError, "no tensors"),
        (lambda: TensorLoader([1, 2], batch_size=1), TypeError, "tensor '0' is a list"),
        (lambda: TensorLoader({"x": 1}, batch_size=1), TypeError, "tensor 'x' is a int"),
        (lambda: TensorLoader(torch.tensor(1), batch_size=1), ValueError, "tensor '0' must have at least one dim"),
        (lambda: TensorLoader(torch.zeros(2), torch.zeros(3), batch_size=1), ValueError, r"\{'0': 2, '1': 3\}"),
        (
            lambda: TensorLoader(torch.zeros(2), torch.zeros(2, device="meta"), batch_size=1),
            ValueError,
            "on one device",
        ),
        (lambda: TensorLoader(torch.zeros(2), batch_size=0), ValueError, "batch_size"),
        (lambda: TensorLoader(torch.zeros(2), batch_size=1, device="no such"), RuntimeError, "no such"),
    ],
)
def test_bad_input_is_refused(make, error, message):
    """The error names the tensor by its position or key."""
    with pytest.raises(error, match=message):
        make()


def test_an_empty_loader_is_refused_before_training(tmp_path):
    """An empty loader is refused, as an empty DataLoader is."""
    with pytest.raises(ValueError, match="loader 'train' is empty"):
        train(tmp_path, lambda *tensors, **arguments: TensorLoader(torch.zeros(0, 6), torch.zeros(0), batch_size=2))
