"""Tests that a stream that differs between processes is refused at its first batch."""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from runnerkit import dl
from runnerkit.engines import WorkerError
from runnerkit.sampling.sharding import batches_of, shard_loader, share_of, start_epoch
from runnerkit.sampling.streams.heads import StreamHead, compare
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
    assert compare(heads(order, num_workers=num_workers)) == "different"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_noisy", [False, True], ids=["plain", "augmented"])
@pytest.mark.parametrize("order", [whole, shuffled_alike])
def test_streams_that_are_alike_are_not_refused(order, is_noisy, num_workers):
    """Equal streams are accepted, even if an augmentation with its own generator changes the features."""
    assert compare(heads(order, num_workers=num_workers, is_noisy=is_noisy)) == "same"


def test_short_streams_and_unknown_objects_are_not_refused():
    """Streams with one sample per rank or with unknown objects are accepted."""
    assert compare(heads(lambda rank: range(2))) == "same"
    head = [StreamHead(0) for _ in range(2)]
    for each in head:
        each.note(0, 0, object())
    assert compare([each.fingerprints for each in head]) == "same"


@dataclass
class Record:
    value: int


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def object_array(value):
    array = np.empty(2, dtype=object)
    array[:] = ["text", value]
    return array


def read_by(*streams):
    """Return the fingerprints of one process for each stream."""
    found = []
    for stream in streams:
        head = StreamHead(0)
        for position, sample in enumerate(stream):
            head.note(0, position, sample)
        found.append(head.fingerprints)
    return found


@pytest.mark.parametrize(
    "make",
    [
        Record,
        Slotted,
        lambda value: SimpleNamespace(record=Record(value)),
        lambda value: {"text", str(value)},
        object_array,
        lambda value: torch.sparse_coo_tensor([[value]], [1.0], (NUM_SAMPLES,)),
        lambda value: {str(number): 0 for number in range(40)} | {"value": value},
        lambda value: {str(number): np.arange(9) for number in range(31)} | {"value": value},
    ],
    ids=["dataclass", "slots", "objects", "set", "object array", "sparse", "last of 41", "last of 32"],
)
def test_samples_of_any_type_are_compared(make):
    """Their content counts, not only their type, and all of their parts."""
    whole, half = range(NUM_SAMPLES), range(1, NUM_SAMPLES, 2)

    assert compare(read_by(map(make, half), map(make, whole))) == "different"
    assert compare(read_by(map(make, whole), map(make, whole))) == "same"


@pytest.mark.parametrize("first", [0, 1, 10])
@pytest.mark.parametrize("as_type", [int, torch.tensor, np.int64, "sample-{:06d}.txt".format])
def test_samples_that_are_numbered_in_each_process_are_seen(first, as_type):
    """A number that only counts does not show that the rest is the same; a target that agrees does."""
    noise = [[random.random() for _ in range(NUM_SAMPLES)] for _ in range(2)]

    def numbered(values):
        return [(as_type(number), value) for number, value in enumerate(values, first)]

    def with_target(values):
        return [(*sample, place % 3) for place, sample in enumerate(numbered(values))]

    assert compare(read_by(numbered(range(0, 32, 2)), numbered(range(1, 32, 2)))) == "only numbered alike"
    assert compare(read_by(*map(numbered, noise))) == "only numbered alike"
    assert compare(read_by(*map(with_target, noise))) == "same"
    assert compare(read_by(numbered([7] * 16), numbered([7] * 16))) == "same"


class Odd:
    """An object that raises in every way that is tried."""

    def __getattr__(self, name):
        raise KeyError(name)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        lambda: torch.ones(3).to_mkldnn(),
        lambda: torch.ones(3, dtype=torch.complex64).conj(),
        lambda: torch.ones(3, device="meta"),
        Odd,
        SimpleNamespace,
        lambda: SimpleNamespace(tobytes=lambda order: b""),
    ],
    ids=["jagged", "nested", "mkldnn", "conjugate", "meta", "raises", "empty", "tobytes with an argument"],
)
def test_a_sample_that_cannot_be_read_is_taken_as_it_is(make):
    """Only the name of its type counts; nothing raises."""
    samples = [(number, make()) for number in range(4)]

    assert compare(read_by(samples, samples)) == "same"


def test_the_order_of_keys_does_not_count():
    """A dict made from a set has another order in each process."""
    there = [{"a": number, "b": "x"} for number in range(NUM_SAMPLES)]
    back = [{"b": "x", "a": number} for number in range(NUM_SAMPLES)]

    assert compare(read_by(there, back)) == "same"


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


class NumberedSplitByRank(IterableDataset):
    """Stream that splits itself by rank and numbers its own samples."""

    def __iter__(self):
        for number, index in enumerate(range(dist.get_rank(), NUM_SAMPLES, dist.get_world_size())):
            yield {"features": torch.full((NUM_FEATURES,), float(index)), "targets": 0, "number": number}


def test_a_stream_that_may_be_split_by_rank_is_reported(capfd):
    """If noise could be the reason as well, rank zero warns, and the run continues."""
    model = mlp()

    dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), ddp=True, cpu=True,
        loaders={"train": DataLoader(NumberedSplitByRank(), batch_size=4)}, **quiet(),
    )  # fmt: skip

    error = capfd.readouterr().err
    assert error.count("loader 'train': the first samples of its stream have the same numbers in every process") == 1
    assert "remove that: split_dataset_by_node" in error
