"""Tests that iterable data sets are sharded as exactly as indexed ones."""

import random
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runnerkit.sampling.sharding import batches_of, count_batches, shard_loader, share_of, start_epoch
from runnerkit.seeding.generators import derive_seed, seed_generators
from tests.shares import Rewinding, counted


class Stream(IterableDataset):
    def __init__(self, num_samples):
        self.num_samples = num_samples

    def __iter__(self):
        return iter(range(self.num_samples))


class SizedStream(Stream):
    def __len__(self):
        return self.num_samples


class Shuffled(Stream):
    def __iter__(self):
        order = list(range(self.num_samples))
        random.shuffle(order)
        for index in order:
            yield index, random.random(), np.random.rand(), float(torch.rand(()))


class SplitByWorker(Stream):
    """Stream that splits itself between workers, as in torch's documentation."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.num_samples, step))


class OfEpoch(Stream):
    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter(range(100 * self.epoch, 100 * self.epoch + self.num_samples))


def shards(loader, world_size, *, training=False):
    where = {"key": "k", "training": training, "world_size": world_size, "seed": 42}
    return [shard_loader(loader, rank=rank, **where) for rank in range(world_size)]


def samples(shard, epoch=1):
    start_epoch(shard, epoch)
    return [batch.tolist() for batch in counted(shard)]


def flat(ranks):
    return [each for batches in ranks for batch in batches for each in batch]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 200), st.integers(1, 33), st.integers(1, 5), st.booleans(), st.booleans())
def test_a_stream_is_shared_like_a_data_set_of_the_same_samples(
    num_samples, batch_size, world_size, training, drop_last
):
    """On every rank, a stream gives the batches and length of an indexed data set with the same samples."""
    stream, indexed = (
        shards(DataLoader(data, batch_size=batch_size, drop_last=drop_last), world_size, training=training)
        for data in (SizedStream(num_samples), range(num_samples))
    )

    for mine, theirs in zip(stream, indexed, strict=True):
        assert samples(mine) == samples(theirs)
        assert count_batches(mine) == count_batches(theirs) == len(list(batches_of(mine)))
        last = count_batches(mine) - 1
        assert not training or world_size == 1 or share_of(mine).sizes_of(last) == share_of(theirs).sizes_of(last)


@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("stream", [Stream, SplitByWorker])
def test_workers_share_it_too(num_workers, stream):
    """Workers give each sample once, in the order without workers, even for a stream that splits itself."""
    plain = shards(DataLoader(Stream(23), batch_size=3), 2)

    ranks = shards(DataLoader(stream(23), batch_size=3, num_workers=num_workers), 2)

    assert [samples(each) for each in ranks] == [samples(each) for each in plain]


def test_a_stream_that_shuffles_does_so_alike_on_all_ranks_and_workers():
    """A stream's order and draws depend on the seed and the epoch only."""

    def drawn(world_size, num_workers, epoch=1):
        loader = DataLoader(Shuffled(20), batch_size=12 // world_size, num_workers=num_workers, collate_fn=torch.tensor)
        ranks = [samples(each, epoch) for each in shards(loader, world_size)]
        return sorted(tuple(each) for each in flat(ranks)), ranks[0][0]

    one, first = drawn(1, 0)

    assert [each[0] for each in first] != list(range(12))
    assert one == drawn(2, 0)[0] == drawn(3, 2)[0] == drawn(1, 1)[0]
    assert one != drawn(1, 0, epoch=2)[0]


class Forked(IterableDataset):
    """Stream that draws without changing the state of torch's generator."""

    def __iter__(self):
        for _ in range(100):
            with torch.random.fork_rng(devices=[]):
                sample = [torch.initial_seed() % 1000, float(torch.rand(()))]
            yield sample


def test_a_stream_has_torchs_generator_to_itself_from_its_first_sample_to_its_last():
    """The seed that it reads, and draws that leave no trace in a state, do not depend on the main process."""

    def drawn(num_workers):
        [shard] = shards(DataLoader(Forked(), batch_size=4, num_workers=num_workers, collate_fn=torch.tensor), 1)
        torch.manual_seed(3)
        return flat([samples(shard)])

    one = drawn(0)

    assert len({tuple(each) for each in one}) == 1 and one == drawn(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_is_its_own_iterator_is_read_once(num_workers):
    """Its __iter__, which starts it again, is called once a pass, as by torch."""
    stream = type("Itself", (Rewinding, IterableDataset), {})(range(100))
    ranks = shards(DataLoader(stream, 4, num_workers=num_workers), 2)

    for epoch in (1, 2):
        for rank in ranks:
            start_epoch(rank, epoch)
        found = [batch.tolist() for rank in ranks for batch in islice(batches_of(rank), 30)]
        assert sorted(number for batch in found for number in batch) == list(range(100))
    assert num_workers or stream.num_starts == 4


def test_workers_that_outlive_an_epoch_see_the_next():
    """set_epoch of the stream is called in persistent workers."""
    loader = DataLoader(OfEpoch(4), batch_size=2, num_workers=1, persistent_workers=True)
    [shard] = shards(loader, 1)

    assert [samples(shard, epoch) for epoch in (1, 2)] == [[[100, 101], [102, 103]], [[200, 201], [202, 203]]]


def check_resumed(loader, before, after, num_batches, num_samples):
    ranks = shards(loader, before, training=True)
    for rank in ranks:
        start_epoch(rank, 3)
    seen = flat([samples(rank, 3)[:num_batches] for rank in ranks])
    position = share_of(ranks[0]).position_after(num_batches)

    for rank in shards(loader, after, training=True):
        start_epoch(rank, 3)
        share_of(rank).skip(position)
        assert count_batches(rank) in (None, len(list(batches_of(rank))))
        seen += flat([[batch.tolist() for batch in counted(rank)]])

    assert sorted(seen) == list(range(num_samples))


@settings(deadline=None, max_examples=100)
@given(st.integers(4, 60), st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.data())
def test_whatever_was_seen_before_an_interruption_is_not_seen_after_it(num_samples, batch_size, before, after, data):
    """A resume after any batch, on any number of processes, continues with exactly the remaining samples."""
    loader = DataLoader(SizedStream(num_samples), batch_size=batch_size)
    num_batches = data.draw(st.integers(1, count_batches(shards(loader, before, training=True)[0])))
    check_resumed(loader, before, after, num_batches, num_samples)


def test_an_interrupted_stream_of_unknown_length_goes_on_with_workers():
    """A resume by one process with two workers continues with the samples that two processes left."""
    check_resumed(DataLoader(Stream(50), batch_size=4, num_workers=2), 2, 1, 2, 50)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    ("num_samples", "training", "expected"),
    [(5, False, [[0, 2, 4], [1, 3]]), (5, True, [[0, 2, 4], [1, 3, 4]]), (1, True, [[0], [0]])],
)
def test_a_stream_of_batches_is_shared_by_whole_batches(num_samples, training, expected, num_workers):
    """Whole batches are sharded; in training, a rank without one gets the last, which counts for another rank."""
    loader = DataLoader(SizedStream(num_samples), batch_size=None, num_workers=num_workers)
    ranks = shards(loader, 2, training=training)

    assert [[int(each) for each in batches_of(rank)] for rank in ranks] == expected
    assert [count_batches(rank) for rank in ranks] == [len(each) for each in expected]
    if training:
        assert [share_of(rank).sizes_of(len(expected[0]) - 1) for rank in ranks] == [[None, 0]] * 2


def test_a_stream_shorter_than_the_processes_is_trained_on_once():
    """One sample for two processes, at the start and after a resume, is rank zero's; the other's weight is zero."""
    for num_samples, position in ((1, 0), (9, 8), (9, [8, 0])):  # 0.1 saved a list
        ranks = shards(DataLoader(Stream(num_samples), batch_size=2), 2, training=True)
        for shard in ranks:
            share_of(shard).skip(position)

        assert [[batch.tolist() for batch in batches_of(shard)] for shard in ranks] == [[[num_samples - 1]]] * 2
        assert [share_of(shard).sizes_of(0) for shard in ranks] == [[1, 0]] * 2


class Late(Stream):
    """Stream that draws only from its 100th sample on."""

    def __init__(self, num_samples, draw=np.random.rand):
        super().__init__(num_samples)
        self.draw = draw

    def __iter__(self):
        for number in range(self.num_samples):
            yield number, self.draw() if number >= 100 else 0.0


LATE = {
    "numpy": np.random.rand,
    "numpy's pairs": np.random.randn,
    "python": random.random,
    "python's pairs": lambda: random.gauss(0, 1),
    "a whole state of words": lambda: sum(random.getrandbits(32) for _ in range(624)),
    "torch": lambda: float(torch.rand(())),
}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_that_starts_to_draw_is_read_again(num_workers):
    """From then on it has a generator of its own, which is the same in any number of processes."""
    whole, halves = (
        [
            [list(zip(*(each.tolist() for each in batch), strict=True)) for batch in batches_of(shard)]
            for shard in shards(DataLoader(Late(160), batch_size, num_workers=num_workers), world_size)
        ]
        for world_size, batch_size in ((1, 8), (2, 4))
    )

    joined = [[each for pair in zip(*batches, strict=True) for each in pair] for batches in zip(*halves, strict=True)]
    assert joined == whole[0]
    assert len({noise for batch in whole[0] for _, noise in batch}) == 61


class OneWay(IterableDataset):
    """A stream that continues where it was left, like one that reads a queue or a socket.

    Args:
        is_iterator: whether each pass is the same iterator, not one around it.
    """

    def __init__(self, num_samples, *, is_iterator):
        self.samples, self.is_iterator = iter(Late(num_samples)), is_iterator

    def __iter__(self):
        return self.samples if self.is_iterator else (each for each in self.samples)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("is_iterator", [True, False])
def test_a_stream_that_cannot_start_again_loses_nothing_when_it_starts_to_draw(is_iterator, num_workers):
    """Its generators are its own from the next samples on."""
    loaders = [DataLoader(OneWay(200, is_iterator=is_iterator), 4, num_workers=num_workers) for _ in range(2)]
    ranks = [shards(loader, 2)[rank] for rank, loader in enumerate(loaders)]  # a stream in each process

    seen = [batch[0].tolist() for rank in ranks for batch in batches_of(rank)]

    assert sorted(number for batch in seen for number in batch) == list(range(200))


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(
    "stream",
    [Shuffled(160), *(Late(160, each) for each in LATE.values())],
    ids=["shuffled", *(f"late: {name}" for name in LATE)],
)
def test_a_stream_draws_what_it_draws_by_itself(stream, num_workers):
    """Its samples are those of a loop that seeds once and then reads, whatever the model draws between the batches."""
    [shard] = shards(DataLoader(stream, 8, num_workers=num_workers, collate_fn=list), 1)
    start_epoch(shard, 3)

    found = []
    for batch in batches_of(shard):
        found += batch
        torch.rand(3), random.gauss(0, 1), np.random.randn()

    seed_generators(derive_seed(share_of(shard).seed, "stream", 3))
    assert found == list(stream)


def test_a_stream_that_declares_to_draw_nothing_is_read_without_a_look_at_generators():
    """It is read as it is, so a stream that draws all the same draws from the model's generators."""

    class Declared(Shuffled):
        draws_nothing = True

    [shard] = shards(DataLoader(Declared(16), 8, collate_fn=list), 1)
    batches = batches_of(shard)
    random.seed(5)
    [first, *_] = batches

    random.seed(5)
    assert [each[0] for each in first] == [each[0] for each in Shuffled(16)][:8]


@pytest.mark.parametrize(
    "stream",
    [Stream(160), Shuffled(160), *(Late(160, each) for each in LATE.values())],
    ids=["draws nothing", "shuffled", *(f"late: {name}" for name in LATE)],
)
def test_generators_of_the_model_are_left_alone(stream):
    """Without workers, the model draws between the batches; where a stream does not draw, its numbers are unchanged."""

    def drawn():
        return float(torch.rand(())), random.random(), np.random.rand(), random.gauss(0, 1), np.random.randn()

    [shard] = shards(DataLoader(stream, 8), 1)
    batches = batches_of(shard)  # draws a seed for workers, as DataLoader does
    seed_generators(1)
    expected = [drawn() for _ in range(20)]
    seed_generators(1)

    found = [drawn() for _ in batches]

    assert found == expected
    batches = batches_of(*shards(DataLoader(stream, 8), 1))
    seed_generators(1)
    assert len([*batches]) == 20  # nothing is drawn between them
    assert drawn() == expected[0]
