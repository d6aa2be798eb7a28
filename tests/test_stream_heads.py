"""Tests that a stream that differs between processes is refused at its first batch."""

import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from runnerkit import dl
from runnerkit.engines import WorkerError
from runnerkit.sampling.sharding import batches_of, shard_loader, share_of, start_epoch
from runnerkit.sampling.stream_heads import StreamHead, differ
from tests.tiny import NUM_FEATURES, mlp, quiet, sgd

NUM_SAMPLES, WORLD_SIZE = 96, 2


class Stream(IterableDataset):
    """Stream of features, keys and targets; `order(rank)` gives the indices that a rank reads."""

    def __init__(self, order, rank, is_noisy=False):
        self.order, self.rank, self.is_noisy = order, rank, is_noisy

    def __iter__(self):
        for index in self.order(self.rank):
            noise = np.random.default_rng().random() if self.is_noisy else 0.0
            yield {"features": torch.full((3,), index + noise), "key": f"sample {index}", "target": index % 2}


def whole(rank):
    return range(NUM_SAMPLES)


def shuffled_alike(rank):
    order = list(range(NUM_SAMPLES))
    random.shuffle(order)
    return order


def split_by_rank(rank):
    return range(rank, NUM_SAMPLES, WORLD_SIZE)


def split_in_halves(rank):
    return range(rank * NUM_SAMPLES // 2, (rank + 1) * NUM_SAMPLES // 2)


def shuffled_otherwise(rank):
    return np.random.default_rng().permutation(NUM_SAMPLES).tolist()


def heads(order, *, num_workers=0, is_noisy=False):
    """Return each rank's fingerprints up to its first batch."""
    found = []
    for rank in range(WORLD_SIZE):
        loader = DataLoader(Stream(order, rank, is_noisy), batch_size=4, num_workers=num_workers)
        shard = shard_loader(loader, key="train", training=True, rank=rank, world_size=WORLD_SIZE, seed=42)
        start_epoch(shard, 1)
        next(batches_of(shard))
        found.append(share_of(shard).head.fingerprints)
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("order", [split_by_rank, split_in_halves, shuffled_otherwise])
def test_streams_that_differ_are_seen(order, num_workers):
    """Different streams are detected with and without workers, even if their targets are equal."""
    assert differ(heads(order, num_workers=num_workers))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_noisy", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("order", [whole, shuffled_alike])
def test_streams_that_are_alike_are_not_refused(order, is_noisy, num_workers):
    """Equal streams are accepted, even if an augmentation with its own generator changes the features."""
    assert not differ(heads(order, num_workers=num_workers, is_noisy=is_noisy))


def test_short_streams_and_unknown_objects_are_not_refused():
    """Streams with one sample per rank or with unknown objects are accepted."""
    assert not differ(heads(lambda rank: range(2)))
    head = [StreamHead(0) for _ in range(2)]
    for each in head:
        each.note(0, 0, object())
    assert not differ([each.fingerprints for each in head])


class SplitByRank(IterableDataset):
    """Stream that splits itself by rank, like ``split_dataset_by_node``."""

    def __iter__(self):
        for index in range(dist.get_rank(), NUM_SAMPLES, dist.get_world_size()):
            yield torch.full((NUM_FEATURES,), float(index)), index % 3


def test_a_stream_that_is_split_by_rank_is_refused_on_two_processes():
    """A stream that splits itself by rank, whose samples would be split twice, raises an error with the fix."""
    model = mlp()

    with pytest.raises((ValueError, WorkerError), match=r"loader 'train': the first samples .* remove that: split_da"):
        dl.SupervisedRunner().train(
            model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), ddp=True, cpu=True,
            loaders={"train": DataLoader(SplitByRank(), batch_size=4)}, **quiet(),
        )  # fmt: skip
