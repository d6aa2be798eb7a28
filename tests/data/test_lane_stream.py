"""A stream of shards is read once by the whole job, and resumes with any number of processes and workers."""

import logging
import random
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from runnerkit import dl
from runnerkit.sampling.sharding import batches_of, share_of, start_epoch
from runnerkit.sampling.streams import lane_readers
from tests.data import places
from tests.data.places import flat, share


class Numbers(IterableDataset):
    """Shards of consecutive numbers; `opened` notes which were read, and from where."""

    def __init__(self, sizes, lanes, draw=None):
        self.sizes, self.lanes, self.draw = sizes, lanes, draw
        self.num_shards = len(sizes)
        self.opened = []

    def shard(self, num_shards, index):
        self.opened.append(index)
        first = sum(self.sizes[:index])
        for number in range(first, first + self.sizes[index]):
            yield number if self.draw is None else (number, self.draw())

    def __iter__(self):
        for index in range(self.num_shards):
            yield from self.shard(self.num_shards, index)


class Late(Numbers):
    """Shards that draw only after their 20th sample."""

    def shard(self, num_shards, index):
        for place, number in enumerate(super().shard(num_shards, index)):
            yield number, random.random() if place > 20 else 0.0


def shares(dataset, world_size=1, *, batch_size, num_workers=0, steps=5):
    """Return the loader of each rank, with epochs of `steps`."""
    collate = list if batch_size else lambda item: [item]
    loader = DataLoader(dataset, batch_size, num_workers=num_workers, collate_fn=collate)
    return places.shares(loader, world_size, steps=steps, epoch=None)


def trained(loaders, epochs):
    """Return the global batches of some epochs, in the order of one process."""
    steps = []
    for epoch in epochs:
        for loader in loaders:
            start_epoch(loader, epoch)
        for parts in zip(*map(batches_of, loaders), strict=True):
            steps.append(flat(zip(*parts, strict=True)))
    return steps


def saved(loaders):
    """Return the position of the job between two epochs."""
    positions = [share_of(loader).position for loader in loaders]
    return share_of(loaders[0]).joined(positions[0], lambda _: [each["within"] for each in positions])


def skip(loaders, position):
    for loader in loaders:
        share_of(loader).skip(position)


SHAPES = {
    "sizes": st.lists(st.integers(0, 30), min_size=8, max_size=20),
    "lanes": st.sampled_from([(1, 2), (2, 1), (4, 1), (2, 2), (4, 2)]),
}


def has_empty_lane(sizes, lanes):
    num_lanes = lanes[0] * lanes[1]
    return any(sum(sizes[lane::num_lanes]) == 0 for lane in range(num_lanes))


@settings(max_examples=40, deadline=None)
@given(**SHAPES, whole_batches=st.booleans(), draws=st.booleans())
def test_any_job_that_divides_the_lanes_sees_one_order(sizes, lanes, whole_batches, draws):
    """Each lane repeats its shards, each pass in an order of its own."""
    if has_empty_lane(sizes, lanes):
        return
    draw = random.random if draws else None
    orders = []
    for world_size in (each for each in (1, 2, 4) if lanes[0] % each == 0):
        batch_size = None if whole_batches else 8 // world_size
        orders.append(trained(shares(Numbers(sizes, lanes, draw), world_size, batch_size=batch_size, steps=8), [1, 2]))
    if whole_batches:  # steps of more processes have more batches
        orders = [flat(order)[:16] for order in orders]

    assert all(order == orders[0] for order in orders)
    num_lanes = lanes[0] * lanes[1]
    for lane in range(num_lanes):
        own = {number for index in range(lane, len(sizes), num_lanes) for number in _numbers_of(sizes, index)}
        order = orders[0] if whole_batches else flat(orders[0])
        seen = [number for number in (each[0] if draws else each for each in order) if number in own]
        for begin in range(0, len(seen) - len(own) + 1, len(own)):
            assert sorted(seen[begin : begin + len(own)]) == sorted(own)  # each pass has every sample once


def _numbers_of(sizes, index):
    return range(sum(sizes[:index]), sum(sizes[: index + 1]))


@settings(max_examples=40, deadline=None)
@given(
    **SHAPES, draws=st.sampled_from([None, random.random, np.random.rand]), first=st.sampled_from([1, 2]),
    second=st.sampled_from([1, 2]), half=st.booleans(), steps=st.integers(1, 9),
)  # fmt: skip
def test_a_job_of_another_size_continues_with_the_same_batches(sizes, lanes, draws, first, second, half, steps):
    """Other processes, and another batch size; only shards that are needed are opened."""
    if has_empty_lane(sizes, lanes) or lanes[0] % first or lanes[0] % second:
        return
    whole = trained(shares(Numbers(sizes, lanes, draws), batch_size=8, steps=steps), range(1, 5))
    loaders = shares(Numbers(sizes, lanes, draws), first, batch_size=8 // first, steps=steps)
    assert trained(loaders, [1, 2]) == whole[: 2 * steps]
    position = saved(loaders)

    stream = Numbers(sizes, lanes, draws)
    loaders = shares(stream, second, batch_size=(4 if half else 8) // second, steps=steps * (2 if half else 1))
    skip(loaders, position)
    rest = trained(loaders, [3, 4])

    if half and lanes[1] > 1:  # turns alternate after half as many samples
        assert sorted(map(str, flat(rest)[:4])) == sorted(map(str, whole[2 * steps][:4]))
    else:
        assert flat(rest) == flat(whole[2 * steps :])


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (1, 4), (4, 1), (4, 2)])
def test_whole_batches_continue_with_other_processes(first, second):
    """The next batch belongs to the next lane, whatever the number of processes."""
    sizes, lanes = [20] * 8, (4, 2)
    whole = flat(trained(shares(Numbers(sizes, lanes), batch_size=None, steps=40), [1]))
    loaders = shares(Numbers(sizes, lanes), first, batch_size=None, steps=12 // first)
    assert flat(trained(loaders, [1])) == whole[:12]

    others = shares(Numbers(sizes, lanes), second, batch_size=None, steps=12 // second)
    skip(others, saved(loaders))

    assert flat(trained(others, [2])) == whole[12:24]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("lanes", "saving", "loading", "message"),
    [
        # Two processes cannot begin with the second batch of a pair.
        ((4, 2), {"batch_size": None, "steps": 3}, {"batch_size": None, "world_size": 2}, "after a number of batches"),
        # The number of workers was changed to one that does not divide the lanes.
        ((2, 2), {"batch_size": 4}, {"batch_size": 4, "num_workers": 3}, r"saved with lanes=\(2, 2\), but now its str"),
    ],
)
def test_a_position_that_cannot_be_continued_is_refused(lanes, saving, loading, message):
    """The error names the position."""
    loaders = shares(Numbers([20] * 8, lanes), **saving)
    trained(loaders, [1])

    with pytest.raises(ValueError, match=message):
        skip(shares(Numbers([20] * 8, lanes), **loading), saved(loaders))


def test_a_pass_that_was_not_begun_is_resumed_as_such():
    """A run of two loaders may be interrupted within the first one."""
    expected = trained(shares(Numbers([20] * 8, (2, 2)), batch_size=4), [1])
    before = shares(Numbers([20] * 8, (2, 2)), batch_size=4)
    again = shares(Numbers([20] * 8, (2, 2)), batch_size=4)

    skip(again, saved(before))

    assert trained(again, [1]) == expected


def test_another_stage_has_another_order():
    """Epochs are counted over all stages."""
    stages = [trained(shares(Numbers([20] * 8, (2, 2)), batch_size=4), [epoch]) for epoch in (1, 2)]

    assert stages[0] != stages[1]


def test_a_resume_opens_only_the_shard_it_needs():
    """The shards before are not read again."""
    sizes = [20] * 16
    loaders = shares(Numbers(sizes, (2, 1)), batch_size=4, steps=72)
    trained(loaders, [1])
    stream = Numbers(sizes, (2, 1))
    again = shares(stream, batch_size=4, steps=1)
    skip(again, saved(loaders))

    trained(again, [2])

    assert len(stream.opened) == 2  # one in each lane; 14 were read before


class Seekable(IterableDataset):
    """A shard with a state; `read` notes what was read of any shard."""

    def __init__(self, numbers, read):
        self.numbers, self.read, self.place = numbers, read, 0

    def __iter__(self):
        while self.place < len(self.numbers):
            self.place += 1
            self.read.append(self.numbers[self.place - 1])
            yield self.numbers[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


class WithStates(Numbers):
    """Shards that can seek."""

    def shard(self, num_shards, index):
        return Seekable(_numbers_of(self.sizes, index), self.opened)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 60), min_size=4, max_size=12), st.integers(1, 40), st.integers(1, 3))
def test_a_shard_with_a_state_is_not_read_again(sizes, steps, batch_size):
    """A resumed run reads at most the samples since the last state."""
    lanes = (2, 2)
    if has_empty_lane(sizes, lanes):
        return
    options = {"batch_size": 2 * batch_size, "steps": steps}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_readers, "_SAMPLES_PER_STATE", 7)
        whole = trained(shares(WithStates(sizes, lanes), **options), range(1, 3))
        loaders = shares(WithStates(sizes, lanes), 2, **options | {"batch_size": batch_size})
        assert trained(loaders, [1]) == whole[:steps]
        stream = WithStates(sizes, lanes)
        again = shares(stream, **options)
        skip(again, saved(loaders))

        assert trained(again, [2]) == whole[steps:]
        assert len(stream.opened) <= 2 * batch_size * steps + 4 * (7 + batch_size)


class OfOneState(IterableDataset):
    """A shard whose state is a dict that it modifies with each sample."""

    def __init__(self, numbers):
        self.numbers, self.state = numbers, {"place": 0}

    def __iter__(self):
        while self.state["place"] < len(self.numbers):
            self.state["place"] += 1
            yield self.numbers[self.state["place"] - 1]

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


class WithOneStateEach(Numbers):
    def shard(self, num_shards, index):
        return OfOneState(_numbers_of(self.sizes, index))


def test_a_shard_may_modify_its_state(monkeypatch):
    """The place of its lane keeps the state as it was, also in a run that resumed twice."""
    monkeypatch.setattr(lane_readers, "_SAMPLES_PER_STATE", 7)
    whole = trained(shares(WithOneStateEach([60] * 4, (2, 2)), batch_size=4, steps=15), range(1, 5))
    found, position = [], None
    for epoch in range(1, 5):
        loaders = shares(WithOneStateEach([60] * 4, (2, 2)), batch_size=4, steps=15)
        if position is not None:
            skip(loaders, position)
        found += trained(loaders, [epoch])
        position = saved(loaders)

    assert found == whole


def late_of_first_worker(samples):
    info = get_worker_info()
    if info is not None and info.id == 0:
        time.sleep(0.2)
    return list(samples)


UNORDERED = {
    "map-style": lambda: list(range(30)),
    "files": lambda: dl.ShardedFiles([0, 1], lambda path: range(15), sizes=[15, 15], lanes=(1, 2)),
    "lanes": lambda: Numbers([8] * 4, (2, 2)),
    "whole stream": lambda: Numbers([8] * 4, (1, 1)),
}


@pytest.mark.parametrize("name", UNORDERED)
def test_batches_come_in_order_even_if_the_loader_lets_fast_workers_overtake(caplog, name):
    """A position counts batches, and so do the weights of short ones."""
    options = {"collate_fn": late_of_first_worker}
    expected = list(batches_of(share(DataLoader(UNORDERED[name](), 4, **options))))

    found = list(batches_of(share(DataLoader(UNORDERED[name](), 4, num_workers=2, in_order=False, **options))))

    assert found == expected
    assert caplog.text.count("in_order=False is ignored") == 1


class Once(Numbers):
    """Shards that are empty when they are read again, as those of a filter that draws may be."""

    def shard(self, num_shards, index):
        return [] if index in self.opened else super().shard(num_shards, index)


def test_a_lane_that_has_no_samples_any_more_is_named():
    """It would be read for ever."""
    with pytest.raises(ValueError, match="'train': the 2 shards of lane 0 of 2 are empty"):
        trained(shares(Once([4] * 4, (2, 1)), batch_size=4, steps=9), [1])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_that_have_read_ahead_lose_nothing(num_workers):
    """The position is that of the batches that were trained on, not of those that were prefetched."""
    sizes, lanes = [5, 9, 3, 7, 6, 8, 4, 5], (2, 2)
    whole = trained(shares(Numbers(sizes, lanes), batch_size=4), range(1, 5))
    loaders = shares(Numbers(sizes, lanes), batch_size=4, num_workers=num_workers)
    assert trained(loaders, [1, 2]) == whole[:10]

    again = shares(Numbers(sizes, lanes), batch_size=4, num_workers=2 - num_workers)
    skip(again, saved(loaders))

    assert trained(again, [3, 4]) == whole[10:]


def test_a_shard_that_starts_to_draw_is_found():
    """The part in which a sample first draws is read again, with seeded generators, in any job."""
    orders = [trained(shares(Late([40] * 4, (2, 1)), size, batch_size=4 // size), [1, 2, 3]) for size in (1, 2)]

    assert orders[0] == orders[1]
    assert {each for _, each in flat(orders[0])} > {0.0}


def test_training_numbers_are_untouched_by_a_stream_that_draws():
    """Without workers, the model's dropout uses the same generators."""
    [loader] = shares(Numbers([40] * 4, (2, 1), random.random), batch_size=4)
    random.seed(7)
    expected = random.Random(7).random()

    trained([loader], [1])

    assert random.random() == expected


def test_what_collate_fn_draws_differs_in_each_batch():
    """Also with several lanes and turns, and the same with any number of workers."""

    def draw(_):
        return random.random()

    drawn = []
    for num_workers in (1, 2):
        loader = DataLoader(Numbers([40] * 8, (2, 4)), 4, num_workers=num_workers, collate_fn=draw)
        drawn.append(list(batches_of(share(loader, steps=40))))

    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == 40


def test_an_evaluation_takes_no_agreement():
    """Lanes end at different times; each process reads until its own have ended."""
    alone, sizes = [], [13, 2, 7, 1, 30, 5, 3, 9]
    for world_size, num_workers in ((1, 0), (1, 2), (2, 1), (4, 2)):
        loader = DataLoader(Numbers(sizes, (4, 2)), 8 // world_size, num_workers=num_workers, collate_fn=list)
        loaders = places.shares(loader, world_size, key="valid", training=False, epoch=None)
        batches = [list(batches_of(each)) for each in loaders]
        assert sorted(flat(flat(batches))) == list(range(sum(sizes)))
        if world_size == 1:
            alone.append(batches)
    assert alone[0] == alone[1]  # whatever the number of workers


MESSAGES = {
    "its own order": ({"lanes": (1, 1)}, "lanes = (1, 1) keeps its order; leave that out"),
    "in training, drop_last": ({"training": True, "drop_last": True}, "leave out drop_last"),
    "few shards": ({"lanes": None, "sizes": [9] * 3}, "it has 3 shards: use fewer workers, or more shards"),
    "drop_last": ({"drop_last": True}, "leave out drop_last"),
    "workers do not divide": ({"num_workers": 3}, "cannot divide its 2 x 2 lanes: set lanes = "),
    "processes do not divide": ({"world_size": 3, "batch_size": 2}, "cannot divide its 2 x 2 lanes: set lanes = "),
    "one shard": ({"sizes": [9]}, "use ShardedFiles"),
}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("name", MESSAGES)
def test_a_stream_that_is_read_by_all_is_warned_about(caplog, name):
    """The warning says how often it is read, and what to write instead."""
    options, message = MESSAGES[name]
    defaults = {"training": False, "sizes": [9] * 8, "lanes": (2, 2), "num_workers": 2, "world_size": 2}
    options = {**defaults, "batch_size": 4, **options}
    dataset, world_size = Numbers(options.pop("sizes"), options.pop("lanes")), options.pop("world_size")
    training, readers = options.pop("training"), world_size * options["num_workers"]

    with caplog.at_level(logging.WARNING):
        share(DataLoader(dataset, **options), 0, world_size, training=training, epoch=None)

    [text] = [record.getMessage() for record in caplog.records]
    assert text.startswith(f"loader 'train': each of {readers} readers ({world_size} processes x ")
    assert message in text
