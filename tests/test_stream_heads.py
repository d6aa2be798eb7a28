"""Tests that a stream that differs between processes is refused at its first batch."""

import random
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from runnerkit.engines import WorkerError
from runnerkit.sampling.sharding import batches_of, shard_loader, share_of, start_epoch
from runnerkit.sampling.streams.heads import StreamHead, compare
from tests.tiny import NUM_FEATURES, train

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
    found = []
    for rank in range(WORLD_SIZE):
        loader = DataLoader(Stream(order, rank, is_noisy), batch_size=4, num_workers=num_workers)
        shard = shard_loader(loader, key="train", training=True, rank=rank, world_size=WORLD_SIZE, seed=42)
        start_epoch(shard, 1)
        next(batches_of(shard))
        found.append(share_of(shard).head.read())
    return found


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("order", "is_noisy", "expected"),
    [
        *((order, False, "different") for order in (split_by_rank, split_in_halves, shuffled_otherwise)),
        *((order, is_noisy, "same") for order in (whole, shuffled_alike) for is_noisy in (False, True)),
    ],
)
def test_streams_that_differ_are_seen_and_equal_ones_accepted(order, is_noisy, expected, num_workers):
    """Even if their targets are equal, or an augmentation with its own generator changes the features."""
    assert compare(heads(order, num_workers=num_workers, is_noisy=is_noisy)) == expected


def test_short_streams_unknown_objects_and_an_order_of_keys_are_not_refused():
    """One sample per rank; objects that cannot be read; a dict made from a set, of another order in each process."""
    assert compare(heads(lambda rank: range(2))) == "same"
    assert compare(read_by([object()], [object()])) == "same"
    there = [{"a": number, "b": "x"} for number in range(NUM_SAMPLES)]
    back = [{"b": "x", "a": number} for number in range(NUM_SAMPLES)]
    assert compare(read_by(there, back)) == "same"


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
    found = []
    for stream in streams:
        head = StreamHead(0)
        for position, sample in enumerate(stream):
            head.note(0, position, sample)
        found.append(head.read())
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


UNREADABLE = {
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "mkldnn": lambda: torch.ones(3).to_mkldnn(),
    "conjugate": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "meta": lambda: torch.ones(3, device="meta"),
    "raises": Odd,
    "empty": SimpleNamespace,
    "tobytes with an argument": lambda: SimpleNamespace(tobytes=lambda order: b""),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", UNREADABLE)
def test_a_sample_that_cannot_be_read_is_taken_as_it_is(name):
    """Only the name of its type counts; nothing raises."""
    samples = [(number, UNREADABLE[name]()) for number in range(4)]

    assert compare(read_by(samples, samples)) == "same"


class SplitByRank(IterableDataset):
    """Stream that splits itself by rank, like ``split_dataset_by_node``."""

    def __iter__(self):
        for index in range(dist.get_rank(), NUM_SAMPLES, dist.get_world_size()):
            yield torch.full((NUM_FEATURES,), float(index)), index % 3


def test_a_stream_that_is_split_by_rank_is_refused_on_two_processes():
    """A stream that splits itself by rank, whose samples would be split twice, raises an error with the fix."""
    with pytest.raises((ValueError, WorkerError), match=r"loader 'train': the first samples .* remove that: split_da"):
        train(num_processes=2, loaders={"train": DataLoader(SplitByRank(), batch_size=4)})


class Rows(IterableDataset):
    """Stream of features and targets."""

    def __init__(self, order):
        self.order = order

    def __iter__(self):
        for index in self.order(0):
            yield torch.full((NUM_FEATURES,), float(index)), index % 3


@pytest.mark.parametrize(("order", "is_warned"), [(shuffled_otherwise, True), (shuffled_alike, False)])
@pytest.mark.parametrize("epoch_steps", [None, 20])
def test_a_stream_that_differs_between_the_workers_of_one_process_is_reported(caplog, order, is_warned, epoch_steps):
    """Each worker takes its part of another order, so samples are missed and repeated."""
    loader = DataLoader(Rows(order), batch_size=4, num_workers=2)

    train(loaders={"train": loader}, num_epochs=2, epoch_steps=epoch_steps)

    assert caplog.text.count("loader 'train': the first samples of its stream are not the same in every worker") == (
        is_warned
    )


class NumberedSplitByRank(SplitByRank):
    def __iter__(self):
        for number, (features, _) in enumerate(super().__iter__()):
            yield {"features": features, "targets": 0, "number": number}


def test_a_stream_that_may_be_split_by_rank_is_reported(capfd):
    """If noise could be the reason as well, rank zero warns, and the run continues."""
    train(num_processes=2, loaders={"train": DataLoader(NumberedSplitByRank(), batch_size=4)})

    error = capfd.readouterr().err
    assert error.count("loader 'train': the first samples of its stream have the same numbers in every process") == 1
    assert "remove that: split_dataset_by_node" in error


def test_a_sample_that_a_worker_is_recording_is_not_compared():
    """It is recorded part by part, the first one last, while another process may read."""
    ahead, behind = StreamHead(2), StreamHead(2)
    for position in range(4):
        ahead.note(1, position, [position * 3.5, "label"])
    for position in range(3):
        behind.note(0, position, [position * 3.5, "label"])
    behind.fingerprints[0, 3, 1] = ahead.fingerprints[1, 3, 1]

    assert compare([ahead.read(), behind.read()]) == "same"
    assert compare([ahead.fingerprints, behind.fingerprints]) == "different"


def test_a_pass_that_was_resumed_at_its_end_is_not_compared_with_the_next():
    """A worker may not have read a sample of the next pass yet when the first batch of it arrives."""
    loader = DataLoader(Stream(shuffled_alike, 0), batch_size=4, num_workers=2)
    shard = shard_loader(loader, key="train", training=True, rank=0, world_size=WORLD_SIZE, seed=42)
    own = share_of(shard)
    start_epoch(shard, 1)
    own.skip(NUM_SAMPLES)
    assert list(batches_of(shard)) == []
    ended = own.head.read()

    start_epoch(shard, 2)

    before = own.head.read()
    next(batches_of(shard))
    after = own.head.read()
    assert compare([before, after]) == "same" and compare([ended, after]) == "different"
