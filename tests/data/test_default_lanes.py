"""Streams with shards have lanes by default: the job reads each sample once, and (1, 1) keeps the stream's order."""

import logging
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.sampling.sharding import batches_of, share_of, start_epoch
from tests.data.places import flat, shares
from tests.data.test_finite_lanes import global_batches, loaders_of, steps_of
from tests.data.test_lane_stream import Numbers, skip
from tests.engines.on_cpu import ddp

SIZES = [9, 7, 11, 4, 8, 10, 6, 9]


class Plain(Numbers):
    """Without `lanes`; `log` notes each sample that is read, also in a worker."""

    def __init__(self, sizes=SIZES, log=None):
        super().__init__(sizes, None)
        del self.lanes
        self.log = log

    def shard(self, num_shards, index):
        for number in super().shard(num_shards, index):
            if self.log is not None:
                with open(self.log, "a") as file:
                    file.write(f"{number}\n")
            yield number


def evaluated(dataset, world_size, *, batch_size=4, num_workers=0, key="valid"):
    """Return the samples of all ranks in an evaluation, rank by rank."""
    loader = DataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=list)
    return [flat(batches_of(each)) for each in shares(loader, world_size, key=key, training=False, epoch=None)]


JOBS = [(1, 0), (4, 0), (2, 2), (8, 0), (3, 0), (1, 3)]


@pytest.mark.parametrize(("world_size", "num_workers"), JOBS)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_any_job_reads_each_sample_once(tmp_path, caplog, world_size, num_workers):
    """As long as each reader can have a shard."""
    log = tmp_path / "log"

    with caplog.at_level(logging.WARNING):
        found = evaluated(Plain(log=log), world_size, num_workers=num_workers)

    assert sorted(flat(found)) == sorted(map(int, log.read_text().split())) == list(range(sum(SIZES)))
    assert not caplog.records


@pytest.mark.parametrize("num_shards", [2, 3, 4, 5, 8, 12, 16, 100])
@pytest.mark.parametrize("batch_size", [8, 6])
def test_one_process_trains_on_the_batches_of_two(caplog, num_shards, batch_size):
    """The default depends on the samples of a step and the number of shards only."""
    sizes = [3 + number % 3 for number in range(num_shards)]

    with caplog.at_level(logging.WARNING):
        one, two = (global_batches(loaders_of(Plain(sizes), size, batch_size=batch_size // size)) for size in (1, 2))

    assert one == two
    assert sorted(flat(one)) == list(range(sum(sizes)))
    assert not caplog.records


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("world_size", "num_workers", "batch_size"), [(3, 0, 2), (1, 3, 2), (3, 0, None)])
def test_a_job_that_does_not_divide_the_default_has_lanes_of_its_own(caplog, world_size, num_workers, batch_size):
    """Each sample is trained on once, and a warning says that the batches are others."""
    with caplog.at_level(logging.WARNING):
        loaders = loaders_of(Plain(), world_size, batch_size=batch_size, num_workers=num_workers)
        ranks = steps_of(loaders)

    taken = [batch for rank, (found, _) in enumerate(ranks) for batch, sizes in found if sizes[rank] != 0]
    assert sorted(taken if batch_size is None else flat(taken)) == list(range(sum(SIZES)))
    [text] = [record.getMessage() for record in caplog.records]
    assert f"{world_size} processes x {num_workers} workers do not divide" in text and "set lanes = " in text


def test_more_readers_than_shards_read_the_whole_stream(caplog):
    """A warning says how many."""
    with caplog.at_level(logging.WARNING):
        found = evaluated(Plain([5, 5, 5]), 4)

    assert sorted(flat(found)) == list(range(15))
    assert "each of 4 readers (4 processes x 0 workers) reads the whole stream; it has 3 shards" in caplog.text


@pytest.mark.parametrize("lanes", [(1, 1), [1, 1]])
def test_one_lane_is_the_order_of_the_stream(lanes):
    """With any number of processes and workers, in training too."""
    expected = [list(range(sum(SIZES)))[first : first + 8] for first in range(0, sum(SIZES), 8)]

    for world_size, num_workers in [(1, 0), (1, 1), (2, 0)]:
        loaders = loaders_of(Numbers(SIZES, lanes), world_size, batch_size=8 // world_size, num_workers=num_workers)
        assert global_batches_of_own_order(loaders) == expected


def global_batches_of_own_order(loaders):
    ranks = []
    for loader in loaders:
        start_epoch(loader, 1)
        ranks.append(list(batches_of(loader)))
    return [sorted(set(flat(parts))) for parts in zip(*ranks, strict=True)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_drop_last_keeps_the_order_of_the_stream(world_size):
    """Of lanes, it would drop all batches after the end of the shortest one."""
    loader = DataLoader(Plain(), 8 // world_size, drop_last=True, collate_fn=list)

    assert global_batches_of_own_order(shares(loader, world_size)) == [
        list(range(first, first + 8)) for first in range(0, 64, 8)
    ]


class Echo(dl.Runner):
    """Predicts the samples."""

    def handle_batch(self, batch):
        raise NotImplementedError

    def predict_batch(self, batch):
        return batch


class Tensors(Plain):
    def shard(self, num_shards, index):
        return map(torch.tensor, super().shard(num_shards, index))


@pytest.mark.parametrize("engine", [dl.CPUEngine(), pytest.param(ddp(), marks=pytest.mark.slow)])
def test_predictions_keep_the_order_of_the_stream(engine):
    """In a wrapper too; each process reads the whole stream."""
    loader = dl.BatchLimitLoaderWrapper(DataLoader(Tensors(), 8), 99)

    found = Echo(model=nn.Linear(1, 1)).predict_loader(loader=loader, engine=engine)

    assert torch.cat(list(found)).tolist() == list(range(sum(SIZES)))
    assert flat(evaluated(Plain(), 1, key="predict")) == list(range(sum(SIZES)))


@pytest.mark.parametrize(("lanes", "is_kept"), [((2, 2), False), ((1, 1), True)])
def test_predictions_of_lanes_are_not_taken_for_the_order_of_the_stream(caplog, lanes, is_kept):
    """A warning says so, and an index, which would label other samples, is refused."""
    stream = Tensors()
    stream.lanes = lanes
    runner, loader = Echo(model=nn.Linear(1, 1)), DataLoader(stream, 8)

    found = torch.cat(list(runner.predict_loader(loader=loader, cpu=True))).tolist()

    assert (found == sorted(found)) == is_kept and len(found) == sum(SIZES)
    assert ("shuffles: predictions come in its order" in caplog.text) != is_kept
    with nullcontext() if is_kept else pytest.raises(ValueError, match=r"shuffles.* lanes=\(1, 1\)"):
        assert list(runner.predict_frame(loader=loader, index=range(sum(SIZES)), cpu=True).index) == sorted(found)


@pytest.mark.parametrize(("first", "second"), [(3, 1), (6, 3), (6, 2)])
def test_a_job_of_another_size_takes_over_the_default_of_the_first(first, second):
    """Even where its own default would be another."""
    before = loaders_of(Plain(), first, batch_size=12 // first)
    ranks = steps_of(before)
    position = share_of(before[0]).joined(None, lambda _: [positions[1] for _, positions in ranks])
    after = loaders_of(Plain(), second, batch_size=12 // second)

    skip(after, position)

    assert in_steps(steps_of(after, epoch=None)) == in_steps(ranks)[2:]


def in_steps(ranks):
    """Return the global batches of what :func:`steps_of` returns."""
    return [
        sorted(sample for rank, (batch, sizes) in enumerate(parts) for sample in batch[: sizes[rank]])
        for parts in zip(*(found for found, _ in ranks), strict=True)
    ]


def test_a_position_of_the_whole_stream_says_how_to_continue_in_its_order():
    """Of a version in which the default was not divided."""
    with pytest.raises(ValueError, match=r"'train': its position .* set dataset.lanes = \(1, 1\)"):
        share_of(loaders_of(Plain(), 1, batch_size=8)[0]).skip(16)
    share = loaders_of(Numbers(SIZES, (1, 1)), 1, batch_size=8)[0]
    start_epoch(share, 1)
    share_of(share).skip(16)
    assert next(iter(batches_of(share))) == list(range(16, 24))
