"""Tests of exact sharding: each sample once, in an order that does not depend on the number of processes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler, TensorDataset

from runnerkit import dl
from runnerkit.sampling.sharding import batches_of, count_batches, shard_loader, share_of, start_epoch
from tests.shares import counted
from tests.tiny import classification, mlp, train, weights


def indices(num_samples):
    return TensorDataset(torch.arange(num_samples))


def split(loader, world_size, *, training=True, key="train", seed=42):
    where = {"key": key, "training": training, "world_size": world_size, "seed": seed}
    return [shard_loader(loader, rank=rank, **where) for rank in range(world_size)]


def shards(loader, world_size, *, training=False, epoch=1, seed=42):
    """Return the batches of each rank that count, as lists of indices; check that the ranks' sizes are known."""
    ranks, num_steps = [], set()
    for shard in split(loader, world_size, training=training, key="k", seed=seed):
        start_epoch(shard, epoch)
        batches = [batch[0].tolist() for batch in counted(shard)]
        num_batches = len(list(batches_of(shard)))
        assert count_batches(shard) == num_batches
        assert len(batches) == num_batches or (training and len(batches) == num_batches - 1)
        ranks.append(batches)
        num_steps.add(num_batches)
    assert not training or len(num_steps) == 1
    return ranks


def flat(ranks):
    return [index for batches in ranks for batch in batches for index in batch]


@settings(deadline=None, max_examples=150)
@given(st.integers(1, 200), st.integers(1, 33), st.integers(1, 5), st.booleans(), st.booleans())
def test_every_sample_is_seen_exactly_once(num_samples, batch_size, world_size, shuffle, training):
    """Each sample is in exactly one shard, and in training all ranks have the same number of batches."""
    loader = DataLoader(indices(num_samples), batch_size=batch_size, shuffle=shuffle)
    ranks = shards(loader, world_size, training=training)

    assert sorted(flat(ranks)) == list(range(num_samples))
    if training and batch_size > 1:
        tail = [len(batches[-1]) for batches in ranks if len(batches) == len(ranks[0])]
        assert min(tail) > 1 or sum(tail) == 1, "batch norm needs two samples"


@settings(deadline=None, max_examples=150)
@given(num_samples=st.integers(1, 100), batch_size=st.integers(1, 9), world_size=st.integers(1, 5))
def test_every_rank_knows_the_sizes_of_all(num_samples, batch_size, world_size):
    """From the first uneven step on, the sizes that a rank states are those that the ranks have."""
    ranks = split(DataLoader(indices(num_samples), batch_size=batch_size), world_size, key="k")
    batches = [list(batches_of(rank)) for rank in ranks]
    total = 0

    for number in range(len(batches[0])):
        stated = [share_of(rank).sizes_of(number) for rank in ranks]
        assert all(each == stated[0] for each in stated)
        if number < share_of(ranks[0]).first_uneven():
            assert stated[0] is None
        sizes = stated[0] or [batch_size] * world_size
        for size, batch in zip(sizes, (each[number][0] for each in batches), strict=True):
            assert size in (len(batch), 0)
        total += sum(sizes)
    assert total == num_samples


@settings(deadline=None, max_examples=50)
@given(num_samples=st.integers(1, 100), batch_size=st.integers(1, 9), world_size=st.integers(1, 4))
def test_drop_last_drops_the_short_global_batch_and_nothing_else(num_samples, batch_size, world_size):
    """drop_last drops the same samples as in one process with the global batch size."""
    loader = DataLoader(indices(num_samples), batch_size=batch_size, drop_last=True)

    ranks = shards(loader, world_size)

    size = batch_size * world_size
    assert sorted(flat(ranks)) == list(range(num_samples // size * size))


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_together_see_the_batches_of_one_process(world_size):
    """Batch i of all ranks together is batch i of one process with the global batch size and the same shuffling."""
    num_samples, batch_size = 24 * world_size, 4

    ranks = shards(DataLoader(indices(num_samples), batch_size=batch_size, shuffle=True), world_size)
    [one] = shards(DataLoader(indices(num_samples), batch_size=batch_size * world_size, shuffle=True), 1)

    for position, joined in enumerate(one):
        together = [batches[position] for batches in ranks]
        assert sorted(index for batch in together for index in batch) == sorted(joined)


def test_the_order_differs_by_epoch_and_by_seed_and_repeats():
    """The order depends on the seed and the epoch only, not on other random draws."""
    loader = DataLoader(indices(50), batch_size=5, shuffle=True)

    first = shards(loader, 1, epoch=1)
    torch.rand(3)
    again = shards(loader, 1, epoch=1)

    assert first == again
    assert first != shards(loader, 1, epoch=2)
    assert first != shards(loader, 1, epoch=1, seed=43)


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(indices(50), 5, shuffle=True),
        lambda: dl.TensorLoader(torch.arange(50), batch_size=5, shuffle=True),
    ],
)
def test_two_loaders_of_one_length_are_shuffled_in_orders_of_their_own(make):
    """Loaders with different keys are shuffled in different orders, which any number of processes share."""

    def order(key, world_size=1):
        share = shard_loader(make(), key=key, training=True, rank=0, world_size=world_size, seed=42).batch_sampler
        list(share)
        return share.order

    assert order("train_a") != order("train_b")
    assert order("train_a") == order("train_a", world_size=2)


def test_a_sampler_with_its_own_generator_is_alike_on_all_ranks():
    """A sampler with its own generator is sharded exactly, and the generator's state does not change."""
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(indices(100), batch_size=5, sampler=RandomSampler(range(100), generator=generator))
    state = generator.get_state()

    ranks = shards(loader, 4)

    assert sorted(flat(ranks)) == list(range(100))
    assert torch.equal(generator.get_state(), state)
    assert shards(loader, 4, epoch=2) != ranks


def test_a_weighted_sampler_is_shared_not_replaced():
    """The draws of a weighted sampler are split between ranks, which never see samples of weight zero."""
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 10 + [0.0] * 90, 40)
    loader = DataLoader(indices(100), batch_size=4, sampler=sampler)

    found = flat(shards(loader, 2))

    assert len(found) == 40 and set(found) <= set(range(10))
    assert sorted(found) == sorted(flat(shards(loader, 1)))


def test_a_batch_sampler_of_the_users_own_is_shared_by_whole_batches():
    """The batches of a custom batch sampler are not split; each goes to one rank."""

    class Pairs(BatchSampler):
        def __iter__(self):
            yield from ([index, index + 1] for index in range(0, 10, 2))

        def __len__(self):
            return 5

    loader = DataLoader(indices(10), batch_sampler=Pairs(range(10), 2, False))

    assert shards(loader, 2) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]
    assert shards(loader, 2, training=True) == [[[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7]]]


def test_a_plain_batch_sampler_passed_by_hand_is_shared_by_samples():
    """A plain BatchSampler is sharded by samples, in the order of its sampler."""
    loader = DataLoader(indices(6), batch_sampler=BatchSampler([5, 4, 3, 2, 1, 0], 2, False))

    assert shards(loader, 2) == [[[5, 3], [1]], [[4, 2], [0]]]
    assert shards(loader, 2, training=True) == [[[5, 3], [1, 0]], [[4, 2]]], "batch norm needs two samples"


def test_a_distributed_sampler_of_the_users_own_is_left_alone(caplog):
    """A loader with a DistributedSampler is returned unchanged, with a warning that padded samples are scored twice."""
    sampler = DistributedSampler(indices(9), num_replicas=2, rank=1)
    loader = DataLoader(indices(9), batch_size=3, sampler=sampler)

    shard = shard_loader(loader, key="valid", training=False, rank=1, world_size=2, seed=42)

    assert shard is loader
    [record] = caplog.records
    assert "scored twice" in record.message


@pytest.mark.parametrize(("rank", "world_size"), [(0, 2), (1, 3), (0, 1)])
@pytest.mark.parametrize("training", [True, False])
def test_a_distributed_sampler_of_another_process_is_named(rank, world_size, training, caplog):
    """For example, one that was made before the processes were started has the same rank in all of them."""
    loader = DataLoader(indices(8), batch_size=2, sampler=DistributedSampler(indices(8), num_replicas=2, rank=1))

    shard_loader(loader, key="k", training=training, rank=rank, world_size=world_size, seed=42)

    assert f"loader 'k': its DistributedSampler is that of rank 1 of 2, in rank {rank} of {world_size}" in caplog.text


def test_every_attribute_of_the_loader_is_kept():
    """A shard keeps all attributes of the loader, even of a subclass with another constructor."""

    class Mine(DataLoader):
        def __init__(self):
            workers = {"num_workers": 1, "timeout": 5, "persistent_workers": True, "prefetch_factor": 3}
            others = {"generator": torch.Generator(), "worker_init_fn": print, "collate_fn": torch.stack}
            super().__init__(indices(10), batch_size=2, **workers, **others)
            self.extra = "mine"

    loader = Mine()
    shard = split(loader, 2)[1]

    assert type(shard) is Mine and shard is not loader
    differing = {name for name in vars(loader) if vars(loader)[name] is not vars(shard)[name]}
    assert differing <= {"batch_sampler", "_iterator"}
    inner = shard._feed
    assert type(inner) is Mine and inner.extra == "mine" and inner.collate_fn is torch.stack
    assert shard.dataset is loader.dataset, "the user's data set must be visible"
    assert isinstance(loader.batch_sampler, BatchSampler), "the user's loader must not change"


def test_a_loader_that_is_no_data_loader_is_refused_by_several_processes():
    """An iterable that is not a DataLoader is refused by several processes and returned unchanged in one."""
    loader = [1, 2, 3]

    with pytest.raises(TypeError, match=r"'train' is a list and cannot be shared among 2 processes; use a DataLoader"):
        split(loader, 2)

    assert split(loader, 1)[0] is loader


def test_a_loader_may_know_its_own_share():
    """A loader's own `shard` method is called if it has one."""

    class Mine:
        def shard(self, *, key, training, rank, world_size, seed):
            return key, training, rank, world_size, seed

    class OfVersion01(Mine):
        def shard(self, *, key, training, rank, world_size, seed, uneven):
            return key, training, rank, world_size, seed, uneven

    place = {"key": "train", "training": True, "rank": 1, "world_size": 2, "seed": 3}
    assert shard_loader(Mine(), **place) == ("train", True, 1, 2, 3)
    assert shard_loader(OfVersion01(), **place) == ("train", True, 1, 2, 3, "drop")


class Fast(DataLoader):
    """Loader that creates the next epoch's iterator at the end of an epoch."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.next_batches = iter(list(super().__iter__()))

    def __iter__(self):
        yield from self.next_batches
        self.next_batches = iter(list(super().__iter__()))


class Repeated:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from self.sampler


class MultiEpochs(DataLoader):
    """Loader like timm's, with one iterator for all epochs over an endless batch sampler."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        vars(self)["batch_sampler"] = Repeated(self.batch_sampler)
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        yield from (next(self.iterator) for _ in range(len(self)))


@pytest.mark.parametrize(("kind", "name"), [(Fast, "next_batches"), (MultiEpochs, "iterator")])
def test_a_loader_that_keeps_an_iterator_is_refused_by_several_processes(kind, name):
    """A loader that stores an iterator, which would give every rank all samples, is refused by several processes."""
    loader = kind(indices(4), batch_size=2)

    with pytest.raises(TypeError, match=f"'train': {kind.__name__} overrides __iter__.* '{name}'.* among 2 processes"):
        split(loader, 2)[0]

    for _ in range(2):
        share = split(loader, 1)[0]
        assert [batch[0].tolist() for batch in batches_of(share)] == [[0, 1], [2, 3]]


def test_a_loader_that_overrides_iteration_is_shared():
    """A loader that overrides __iter__ iterates over its shard."""

    class Doubled(DataLoader):
        def __iter__(self):
            return ([2 * each for each in batch] for batch in super().__iter__())

    assert shards(Doubled(indices(4), batch_size=1), 2) == [[[0], [4]], [[2], [6]]]


BATCHES = {
    "arrays": np.array_split(np.arange(6), 3),
    "matrix": np.arange(6).reshape(3, 2),
    "tensors": list(torch.arange(6).split(2)),
    "ranges": [range(2), range(2, 4), range(4, 6)],
    "sets": [{0, 1}, {2, 3}, {4, 5}],
}


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("data", [list(range(6)), TensorDataset(torch.arange(6))], ids=["samples", "whole batches"])
def test_a_batch_of_a_batch_sampler_is_any_iterable_of_indices(name, data):
    """Batches may be any iterable of indices, as in plain PyTorch, with and without __getitems__."""
    loader = DataLoader(data, batch_sampler=BATCHES[name], collate_fn=torch.tensor)

    for world_size in (1, 2):
        ranks = split(loader, world_size, training=False)
        found = [batch.flatten().tolist() for share in ranks for batch in batches_of(share)]
        assert sorted(found) == [[0, 1], [2, 3], [4, 5]]


def test_a_tuple_may_be_the_index_of_an_element():
    """With batch_size=None, indices such as tuples are passed to the data set unchanged."""
    loader = DataLoader(torch.arange(9).view(3, 3), batch_size=None, sampler=[(0, 1), (2, 2)])
    share = split(loader, 1, training=False)[0]

    assert [int(each) for each in batches_of(share)] == [int(each) for each in loader] == [1, 8]


class Endless:
    """Practically endless sampler, which raises if it is exhausted."""

    def __iter__(self):
        for index in range(1000):
            yield index % 7
        raise AssertionError("was drained")


class EndlessBatches(Endless):
    def __iter__(self):
        return ([index, index + 1] for index in super().__iter__())


ENDLESS = {
    "Endless": lambda: DataLoader(indices(8), batch_size=2, sampler=Endless()),
    "EndlessBatches": lambda: DataLoader(indices(8), batch_sampler=EndlessBatches()),
    "BatchSampler": lambda: DataLoader(indices(8), batch_sampler=BatchSampler(Endless(), 2, False)),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_an_endless_sampler_runs_in_one_process_and_is_refused_by_several(name):
    """It is iterated lazily in one process, with an unknown length, as in plain torch; it cannot be sharded."""
    [share] = split(ENDLESS[name](), 1)

    mine, theirs = (
        [batch[0].tolist() for batch, _ in zip(batches, range(5), strict=False)]
        for batches in (batches_of(share), ENDLESS[name]())
    )
    assert mine == theirs and count_batches(share) is None
    with pytest.raises(TypeError, match=f"loader 'train': its {name} does not have a length.* among 2 processes; "):
        split(ENDLESS[name](), 2)


def test_an_endless_sampler_trains_a_limited_epoch():
    """BatchLimitLoaderWrapper sets the number of steps per epoch of an endless sampler."""
    whole = DataLoader(classification(8), batch_size=2, sampler=Endless())
    runner = train(loaders={"train": dl.BatchLimitLoaderWrapper(whole, num_batches=4)}, num_epochs=2)

    assert runner.batch_step == 8


@pytest.mark.parametrize(
    ("num_samples", "training", "expected"),
    [(5, False, [[0, 2, 4], [1, 3]]), (5, True, [[0, 2, 4], [1, 3, 3]]), (1, True, [[0], [0]])],
)
def test_samples_that_are_whole_batches_are_shared_whole(num_samples, training, expected):
    """With batch_size=None, whole samples are sharded; in training, a rank without one repeats one."""
    loader = DataLoader([torch.tensor([each]) for each in range(num_samples)], batch_size=None)

    for rank in range(2):
        shard = shard_loader(loader, key="k", training=training, rank=rank, world_size=2, seed=42)
        assert [int(batch) for batch in batches_of(shard)] == expected[rank]
        assert count_batches(shard) == len(expected[rank])
        assert share_of(shard).sizes_of(len(expected[0]) - 1) == [None, 0]


def test_fewer_samples_than_processes_are_trained_on_once():
    """Ranks without a sample get those of rank zero, which count for it alone."""
    ranks = split(DataLoader(indices(3), batch_size=1), 4)

    assert [[batch[0].tolist() for batch in batches_of(rank)] for rank in ranks] == [[[0]], [[1]], [[2]], [[0]]]
    assert {tuple(share_of(rank).sizes_of(0)) for rank in ranks} == {(1, 1, 1, 0)}


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 60), st.integers(1, 9), st.integers(1, 4), st.booleans(), st.integers(1, 70))
def test_a_pass_may_end_after_a_number_of_samples(num_samples, batch_size, world_size, drop_last, limit):
    """The ranks together see the first `limit` samples of the order, without a global batch that it drops."""
    loader = DataLoader(indices(num_samples), batch_size=batch_size, drop_last=drop_last)
    stride, seen = batch_size * world_size, []
    for shard in split(loader, world_size):
        start_epoch(shard, 1)
        share_of(shard).end_after(limit)
        seen += [each for batch in counted(shard) for each in batch[0].tolist()]

    whole = num_samples // stride * stride if drop_last else num_samples
    assert sorted(seen) == list(range(min(limit, whole)))


@settings(deadline=None, max_examples=200)
@given(st.integers(4, 100), st.integers(1, 9), st.integers(1, 4), st.integers(1, 8), st.booleans(), st.data())
def test_whatever_was_seen_before_an_interruption_is_not_seen_after_it(
    num_samples, batch_size, before, after, drop_last, data
):
    """A resume after any batch, by any number of processes, reads the rest in equally many batches on each rank."""
    loader = DataLoader(indices(num_samples), batch_size=batch_size, shuffle=True, drop_last=drop_last)
    ranks = split(loader, before)
    if not count_batches(ranks[0]):
        return
    num_batches = data.draw(st.integers(1, count_batches(ranks[0])))
    for rank in ranks:
        start_epoch(rank, 5)
    seen = [each for rank in ranks for batch in list(counted(rank))[:num_batches] for each in batch[0].tolist()]
    [position] = {rank.batch_sampler.position_after(num_batches) for rank in ranks}

    rest = split(loader, after)
    for rank in rest:
        start_epoch(rank, 5)
        share_of(rank).skip(position)
        seen += [each for batch in counted(rank) for each in batch[0].tolist()]

    assert {len(list(batches_of(rank))) for rank in rest} == {count_batches(rest[0])}
    assert len(seen) == len(set(seen)) and (drop_last or sorted(seen) == list(range(num_samples)))


@pytest.mark.parametrize("epoch_steps", [None, 4])
@pytest.mark.parametrize("limit", ["num_steps", "num_samples"])
@pytest.mark.parametrize("own_batches", [False, True])
def test_a_budget_takes_what_it_needs_of_a_long_order(own_batches, limit, epoch_steps, tmp_path):
    """Three steps on ten thousand million drawn samples are those on a thousand; a resumed run continues."""
    if own_batches and limit == "num_samples":
        pytest.skip("nobody knows the sizes of its batches")

    def fit(length, **options):
        data, model = classification(50), mlp()
        sampler = RandomSampler(data, replacement=True, num_samples=length)
        drawn = {"batch_sampler": _Drawn(data, length // 4)}
        batches = DataLoader(data, **(drawn if own_batches else {"sampler": sampler, "batch_size": 4}))
        train(model, loaders={"train": batches}, accumulation_steps=2, epoch_steps=epoch_steps, **options)
        return weights(model)

    size = 8 if limit == "num_samples" else 1
    whole = fit(1000, **{limit: 5 * size})
    fit(int(1e10), **{limit: 3 * size}, logdir=tmp_path)
    assert torch.equal(fit(int(1e10), **{limit: 5 * size}, logdir=tmp_path, resume="auto"), whole)


class _Drawn(torch.utils.data.Sampler):
    def __init__(self, data, length):
        self.data, self.length = data, length

    def __iter__(self):
        for _ in range(self.length):
            yield torch.randint(len(self.data), (4,)).tolist()

    def __len__(self):
        return self.length
