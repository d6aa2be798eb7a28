"""Tests that random draws of a `collate_fn` are the same after a resume within an epoch."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from runnerkit import dl
from runnerkit.sampling import seeded_dataset
from runnerkit.sampling.sharding import batches_of, shard_loader, share_of, start_epoch
from tests.interrupt import Interrupt
from tests.shares import Stream
from tests.tiny import classification, mlp, train, weights


def noisy(fetched):
    """Return the fetched samples as a list, so that they can be compared, and a draw from each generator."""
    return np.asarray(fetched).tolist(), float(torch.rand(())), random.random(), np.random.rand()


class Own(Dataset):
    """Custom data set that draws no random numbers, which the library cannot know."""

    def __len__(self):
        return 22

    def __getitem__(self, index):
        return index


class Rows(Own):
    def __getitems__(self, indices):
        return np.asarray(indices)


BATCHES = [[first, first + 1] for first in range(0, 22, 2)]
LOADERS = {
    "tensors": lambda **kwargs: DataLoader(TensorDataset(torch.arange(22)), 4, shuffle=True, **kwargs),
    "own": lambda **kwargs: DataLoader(Own(), 4, shuffle=True, **kwargs),
    "rows": lambda **kwargs: DataLoader(Rows(), 4, **kwargs),
    "batch sampler": lambda **kwargs: DataLoader(range(22), batch_sampler=BATCHES, **kwargs),
    "single": lambda **kwargs: DataLoader(range(8), batch_size=None, **kwargs),
    "stream": lambda **kwargs: DataLoader(Stream(range(22)), 4, **kwargs),
    "single of a stream": lambda **kwargs: DataLoader(Stream(range(22)), batch_size=None, **kwargs),
}


def batches(name, *, num_workers, skip=0, epoch=1, rank=0, world_size=1):
    loader = LOADERS[name](num_workers=num_workers, collate_fn=noisy)
    share = shard_loader(loader, key="train", training=True, rank=rank, world_size=world_size, seed=42)
    start_epoch(share, epoch)
    if skip:
        share_of(share).skip(share_of(share).position_after(skip))
    torch.manual_seed(100 * num_workers + skip)  # source of the workers' base seeds, which must not matter
    return list(batches_of(share))


@pytest.mark.parametrize("name", LOADERS)
def test_what_collate_fn_draws_in_a_worker_depends_on_seed_epoch_and_place_only(name):
    """Draws do not depend on workers and resumes, and each batch, rank and epoch has different draws."""
    whole = batches(name, num_workers=1)

    assert batches(name, num_workers=2) == whole
    assert batches(name, num_workers=2, skip=3) == batches(name, num_workers=1, skip=3) == whole[3:]
    ranks = [batches(name, num_workers=1, rank=rank, world_size=2) for rank in range(2)]
    ranks[1] = ranks[1][: len(whole) // 2]  # without a repeated batch
    others = [*whole, *batches(name, num_workers=1, epoch=2)]
    for draws in ([batch[1:] for batch in others], [batch[1:] for rank in ranks for batch in rank]):
        assert [len(set(each)) for each in zip(*draws, strict=True)] == [len(draws)] * 3


def test_collate_fn_does_not_draw_what_the_first_sample_drew():
    """The draws of collate_fn differ from those of the batch's samples."""

    class Drawing(Own):
        def __getitem__(self, index):
            return float(torch.rand(()))

    loader = DataLoader(Drawing(), 4, num_workers=1, collate_fn=noisy)
    share = shard_loader(loader, key="train", training=True, rank=0, world_size=1, seed=42)

    for samples, drawn, *_ in batches_of(share):
        assert drawn not in samples


@pytest.mark.parametrize("collate_fn", [None, default_collate])
def test_the_default_collate_fn_costs_no_seeding(collate_fn, monkeypatch):
    """The default collate_fn with a TensorDataset does not seed generators in workers."""
    monkeypatch.setattr(seeded_dataset, "seed_generators", None)
    monkeypatch.setattr(seeded_dataset, "derive_seed", None)
    loader = DataLoader(TensorDataset(torch.zeros(8)), 4, num_workers=1, collate_fn=collate_fn)
    share = shard_loader(loader, key="train", training=True, rank=0, world_size=1, seed=42)

    assert len(list(batches_of(share))) == 2


def with_noise(samples):
    features, targets = default_collate(samples)
    noise = torch.randn_like(features) + random.random() + np.random.rand()
    return features + 0.1 * noise.float(), targets


def fit(logdir, data, num_workers, *callbacks, **options):
    batches = DataLoader(data, batch_size=4, num_workers=num_workers, collate_fn=with_noise)
    save = dl.CheckpointCallback(logdir, content="runner", every_steps=1)
    options = {"num_epochs": 2, "logdir": logdir, "loggers": {"csv": None, "tensorboard": None}, **options}
    return train(mlp(dropout=0.3), loaders={"train": batches}, callbacks=[save, *callbacks], **options)


@pytest.mark.parametrize("data", [classification(24), Stream(classification(24))], ids=["tensors", "stream"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_resumed_within_an_epoch_equals_the_uninterrupted_one(tmp_path, data, num_workers):
    """With noise from `collate_fn`, a resumed run equals an uninterrupted one bit for bit, with and without workers."""
    expected = fit(tmp_path / "whole", data, num_workers)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "broken", data, num_workers, Interrupt(5))

    resumed = fit(tmp_path / "broken", data, num_workers, resume="auto")

    assert torch.equal(weights(resumed.model), weights(expected.model))
    assert resumed.experiment_metrics == expected.experiment_metrics
