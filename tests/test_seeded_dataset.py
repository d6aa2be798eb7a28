"""Tests that the random draws of a sample depend only on the seed, the epoch and its place."""

import itertools
import operator
import random

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from runnerkit import dl
from runnerkit.sampling import seeded_dataset
from runnerkit.sampling.sharding import batches_of, shard_loader, share_of, start_epoch
from runnerkit.seeding import generators
from tests.tiny import classification, mlp, train, weights


class Noisy(Dataset):
    """Data set whose samples draw from all three generators."""

    def __init__(self, num_samples):
        self.num_samples = num_samples
        self.num_fetched = 0

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        self.num_fetched += 1
        return index, random.random(), np.random.rand(), float(torch.rand(()))


class OfEpoch(Noisy):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return index, self.epoch


def share(loader, training=True):
    return shard_loader(loader, key="k", training=training, rank=0, world_size=1, seed=42)


def draws(loader, *, world_size=1, epoch=1, skip=0, key="k", training=False):
    """Return all samples of an epoch over all ranks, as sorted tuples."""
    found = []
    for rank in range(world_size):
        shard = shard_loader(loader, key=key, training=training, rank=rank, world_size=world_size, seed=42)
        start_epoch(shard, epoch)
        share_of(shard).skip(skip)
        found += [tuple(sample) for batch in batches_of(shard) for sample in torch.stack(batch, dim=1).tolist()]
    return sorted(found)


def loader(num_samples=24, *, dataset=None, **kwargs):
    return DataLoader(dataset or Noisy(num_samples), **{"batch_size": 4, "shuffle": True, **kwargs})


def test_what_a_sample_draws_depends_on_seed_epoch_and_place_only():
    """Draws are the same for any processes, workers and batch size, and differ between epochs and loaders."""
    one = draws(loader())

    assert len({sample[1:] for sample in one}) == 24, "each sample must have its own draw"
    assert draws(loader(), world_size=2) == one
    assert draws(loader(batch_size=3), world_size=3) == one
    assert draws(loader(num_workers=2)) == one
    assert draws(loader(num_workers=1), world_size=2) == one
    assert draws(loader(dataset=Subset(Noisy(24), range(24)))) == one
    assert draws(loader(), epoch=2) != one
    assert draws(loader(shuffle=False)) != draws(loader(shuffle=False), key="another loader")


def test_each_sample_of_a_batch_sampler_draws_its_own():
    """Each sample of a batch sampler has its own draw from each generator; torch takes seeds modulo 2**32."""
    found = draws(DataLoader(Noisy(24), batch_sampler=[list(range(start, start + 4)) for start in range(0, 24, 4)]))

    assert [len({sample[column] for sample in found}) for column in (1, 2, 3)] == [24, 24, 24]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_generators_draw_apart_from_each_other(num_workers):
    """The generators get different seeds, because torch and NumPy draw the same numbers from the same seed."""
    dataset = DrawsFrom(24, lambda: (int(torch.randint(256, ())), np.random.randint(256), random.randrange(256)))

    found = [numbers for _, numbers in sorted(samples(dataset, num_workers=num_workers))]

    for one, other in itertools.combinations(zip(*found, strict=True), 2):
        assert sum(map(operator.eq, one, other)) < 4


def test_a_seed_and_an_index_make_another_seed_for_each_sample():
    """torch.initial_seed() + index, which some data sets use as a seed, is unique for each sample."""

    class OwnGenerator(Noisy):
        def __getitem__(self, index):
            return torch.initial_seed() + index

    assert len(set(samples(OwnGenerator(1000), training=True))) == 1000


def samples(dataset, *, num_workers=0, training=False):
    whole = loader(dataset=dataset, num_workers=num_workers, collate_fn=list)
    return [sample for batch in batches_of(share(whole, training)) for sample in batch]


def test_what_a_sample_draws_survives_an_interruption():
    """The remaining samples of a resumed epoch have the same draws as in an uninterrupted epoch."""
    whole, rest = draws(loader()), draws(loader(), skip=8)

    assert len(rest) == 16 and set(rest) < set(whole)
    assert draws(loader(num_workers=2), skip=8) == rest


def test_the_models_generators_are_left_alone():
    """The main process's generators advance equally with and without workers, so that dropout is the same."""
    after = []
    for num_workers in (0, 2):
        shard = share(loader(num_workers=num_workers))
        torch.manual_seed(3), random.seed(3), np.random.seed(3)
        assert len(list(batches_of(shard))) == 6
        after.append((float(torch.rand(())), random.random(), np.random.rand()))

    assert after[0] == after[1]


class SeenState(Noisy):
    """Data set that declares `draws_nothing` and records torch's seed."""

    draws_nothing = True

    def __getitem__(self, index):
        self.num_fetched += 1
        self.seen = torch.initial_seed()
        return index


class MayDraw(SeenState):
    pass


@pytest.mark.parametrize(("kind", "is_spared"), [(SeenState, True), (MayDraw, False)])
def test_a_class_that_says_it_draws_nothing_is_left_unseeded(kind, is_spared):
    """A class with `draws_nothing = True` is not seeded; a subclass must declare it again."""
    dataset = kind(8)
    whole = DataLoader(Subset(dataset, range(8)), batch_size=4)
    shard = share(whole)
    before = torch.initial_seed()

    list(batches_of(shard))

    assert dataset.num_fetched == 8 and (dataset.seen == before) is is_spared
    assert torch.initial_seed() == before


@pytest.mark.parametrize("data", [TensorDataset(torch.zeros(8)), dl.TensorRows(torch.zeros(8)), [0.0] * 8, range(8)])
def test_what_is_known_to_draw_nothing_costs_no_seeding(data, monkeypatch):
    """TensorDataset, TensorRows, lists and ranges are not seeded."""
    monkeypatch.setattr(seeded_dataset, "seed_generators", None)
    monkeypatch.setattr(seeded_dataset, "keep_cpu_rng", None)
    monkeypatch.setattr(seeded_dataset, "CPUState", None)
    collate = dl.TensorRows.collate if isinstance(data, dl.TensorRows) else None
    whole = DataLoader(data, batch_size=4, collate_fn=collate)
    shard = share(whole)

    assert len(list(batches_of(shard))) == 2


class OftenPlain(Noisy):
    """Data set that draws in its second half only, so that first batches may not draw."""

    def __getitem__(self, index):
        return index, random.random() if index >= self.num_samples // 2 else 0.0


def test_samples_that_draw_after_others_that_do_not_draw_what_they_always_draw():
    """Draws that start late in an epoch do not depend on processes, workers and resumes."""
    one = draws(loader(dataset=OftenPlain(24), shuffle=False))

    assert len({sample[1] for sample in one}) == 13
    assert draws(loader(dataset=OftenPlain(24), shuffle=False, num_workers=1)) == one
    assert draws(loader(dataset=OftenPlain(24), shuffle=False), world_size=2) == one
    assert draws(loader(dataset=OftenPlain(24), shuffle=False), skip=16) == one[16:]


class DrawsFrom(Noisy):
    def __init__(self, num_samples, draw):
        super().__init__(num_samples)
        self.draw = draw

    def __getitem__(self, index):
        self.num_fetched += 1
        return index, self.draw()


DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "python": random.random,
    "python's pairs": lambda: random.gauss(0, 1),
    "numpy": np.random.rand,
    "numpy's pairs": np.random.randn,
    "nothing": lambda: 0.0,
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_generators_are_seeded_once_they_are_drawn_from(name, training):
    """Only the first batch that draws is fetched again; draws do not depend on the loader, and states are restored.

    In training, draws from torch are assumed.
    """
    draw, is_known = DRAWS[name], name == "nothing" or (name == "torch" and training)
    np.random.randn(), random.gauss(0, 1)  # both cache the second value of a pair outside of the state words
    before = np.random.get_state()[4], random.getstate()
    dataset = DrawsFrom(24, draw)

    found = draws(loader(dataset=dataset, shuffle=False), training=training)

    assert dataset.num_fetched == 24 + (0 if is_known else 4)
    assert (np.random.get_state()[4], random.getstate()) == before
    assert found == draws(loader(dataset=DrawsFrom(24, draw), shuffle=False, num_workers=1))
    assert found == draws(loader(dataset=DrawsFrom(24, draw), shuffle=False, batch_size=1), world_size=2)


@pytest.mark.parametrize("is_in_memory", [True, False], ids=["looked at in memory", "asked for"])
@pytest.mark.parametrize("name", [name for name in DRAWS if name != "nothing"])
def test_what_was_drawn_is_seen_and_put_back(name, is_in_memory, monkeypatch):
    """CPUState detects and restores every draw, including a cached Gaussian with unchanged state words."""
    # Without the states in memory, each batch would copy 1249 numbers twice.
    assert generators._python_words is not None and generators._numpy_gaussian() is not None
    if not is_in_memory:
        monkeypatch.setattr(generators, "_python_words", None)
        monkeypatch.setattr(generators, "_numpy_gaussian", lambda: None)
        monkeypatch.setattr(generators, "_marks", None)
    draw = DRAWS[name]
    draw()
    drawn = []
    for _ in range(3):
        state, mark = generators.CPUState(), generators.python_and_numpy_mark()
        assert not state.moved()
        drawn.append(draw())
        assert state.moved() == {name.split("'")[0]}
        assert (generators.python_and_numpy_mark() == mark) is (name == "torch")
        state.restore()
        assert not state.moved()
        assert generators.python_and_numpy_mark() == mark

    assert drawn[0] == drawn[1] == drawn[2] == draw()


def test_a_gaussian_that_a_state_brings_back_is_seen():
    """A restored state with a cached Gaussian is detected even if its words are those last seen."""
    np.random.seed(3), np.random.randn()
    held = generators.rng_state()
    np.random.randn()
    generators.CPUState()

    generators.set_rng_state(held)
    with generators.keep_cpu_rng():
        np.random.rand()

    assert np.random.get_state()[3:] == held["numpy"][3:]


class Counted(Dataset):
    def __init__(self, num_samples):
        self.num_fetched = torch.zeros(num_samples, dtype=torch.int64).share_memory_()

    def __len__(self):
        return len(self.num_fetched)

    def __getitem__(self, index):
        self.num_fetched[index] += 1
        return index, np.random.rand(), random.random()


def test_workers_of_later_epochs_know_what_those_before_found_out():
    """Workers fetch their first batch again in the first epoch only, and later workers know the generators."""
    dataset = Counted(24)
    shard = share(DataLoader(dataset, batch_size=3, num_workers=2))
    num_fetched = []
    for epoch in (1, 2, 3):
        start_epoch(shard, epoch)
        list(batches_of(shard))
        num_fetched.append(int(dataset.num_fetched.sum()) - sum(num_fetched))

    assert num_fetched[0] <= 24 + 2 * 3 and num_fetched[1:] == [24, 24]


@pytest.mark.parametrize(
    ("library", "read", "draw"), [(random, "getstate", random.random), (np.random, "get_state", np.random.rand)]
)
def test_a_draw_while_the_state_is_read_is_seen(library, read, draw, monkeypatch):
    """A draw while the state is read, for example by a signal handler, is detected."""
    read_now = getattr(library, read)

    def interrupted():
        state = read_now()
        draw()
        return state

    draw()
    with monkeypatch.context() as patch:
        patch.setattr(generators, "_python_words", None)  # else the libraries are not asked
        patch.setattr(generators, "_numpy_gaussian", lambda: None)
        patch.setattr(library, read, interrupted)
        generators.CPUState()

    with generators.keep_cpu_rng():
        drawn = draw()
    assert draw() == drawn


@pytest.mark.parametrize("other", [np.random.PCG64, type("Mine", (np.random.MT19937,), {})])
@pytest.mark.parametrize("read", [generators.rng_state, generators.CPUState])
def test_numpys_global_functions_are_to_draw_from_their_own_generator(read, other):
    """Another global NumPy bit generator than MT19937 raises an error, because the state is read from memory."""
    usual = np.random.get_bit_generator()
    np.random.set_bit_generator(other(1))
    try:
        with pytest.raises(RuntimeError, match=rf"from MT19937, .* got {other.__name__}: call np\.random\.set_bit_gen"):
            read()
    finally:
        np.random.set_bit_generator(usual)


def test_images_that_are_only_looked_at_are_not_seeded(monkeypatch):
    """Samples that do not draw are not seeded in evaluation; only the loader's order is."""
    seeded = []
    monkeypatch.setitem(seeded_dataset.GENERATORS, "torch", seeded.append)

    draws(loader(dataset=DrawsFrom(24, lambda: 0.0)), training=False)
    assert len(seeded) == 1
    draws(loader(dataset=DrawsFrom(24, lambda: 0.0)), training=True)
    assert len(seeded) == 1 + (1 + 24)


def test_a_sample_that_fails_leaves_the_generators_as_they_were():
    """A sample that raises an error leaves all generators unchanged."""

    def fail():
        random.random(), np.random.rand(), torch.rand(())
        raise OSError("no such image")

    state = random.getstate(), np.random.get_state()[2], torch.initial_seed()
    with pytest.raises(OSError, match="no such image"):
        draws(loader(dataset=DrawsFrom(24, fail)))
    assert (random.getstate(), np.random.get_state()[2], torch.initial_seed()) == state


def test_a_data_set_that_fetches_whole_batches_does_so():
    """A data set with __getitems__ is called once per batch and seeded once."""

    class Vectorised(Noisy):
        def __getitems__(self, indices):
            self.calls = [*getattr(self, "calls", []), list(indices)]
            noise = torch.rand(len(indices))
            return list(zip(indices, noise, strict=True))

    dataset = Vectorised(6)
    found = draws(loader(dataset=dataset, shuffle=False))

    assert dataset.calls == [[0, 1, 2, 3], [4, 5]]
    assert found == draws(loader(dataset=Vectorised(6), shuffle=False, num_workers=1))


def test_workers_that_outlive_an_epoch_see_the_next():
    """set_epoch of the data set is called in persistent workers."""
    kept = loader(dataset=OfEpoch(4), num_workers=1, persistent_workers=True)
    shard = share(kept)

    seen = []
    for epoch in (1, 2):
        start_epoch(shard, epoch)
        seen.append({int(each) for batch in batches_of(shard) for each in batch[1]})

    assert seen == [{1}, {2}]


class NoisyStream(IterableDataset):
    def __iter__(self):
        return (tuple(Noisy(24)[index]) for index in range(24))


class Augmented(Dataset):
    def __init__(self):
        self.data = classification(36)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        features, target = self.data[index]
        return features * (1 + 0.5 * random.random()) + torch.randn(6) * float(np.random.rand()), target


def fit(num_workers):
    runner = train(
        mlp(dropout=0.3), num_epochs=2,
        loaders={"train": DataLoader(Augmented(), batch_size=6, shuffle=True, num_workers=num_workers)},
    )  # fmt: skip
    return weights(runner.model)


def test_a_run_with_dropout_and_augmentation_does_not_depend_on_the_number_of_workers():
    """Weights after two epochs are equal bit for bit for any number of workers."""
    one, *others = (fit(num_workers) for num_workers in (0, 1, 2))

    assert all(torch.equal(each, one) for each in others)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
@pytest.mark.parametrize("data", [Noisy(24), NoisyStream()], ids=["indexed", "stream"])
def test_stateful_data_loaders_are_shared_too(data):
    """StatefulDataLoader is sharded by samples, with its class, order and draws, for any processes and workers."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def mine(**kwargs):
        return StatefulDataLoader(data, batch_size=4, **kwargs)

    one, is_indexed = draws(mine()), isinstance(data, Noisy)

    assert type(share(mine())) is StatefulDataLoader
    assert [sample[0] for sample in one] == list(range(24))
    assert one == draws(DataLoader(data, batch_size=4))
    assert draws(mine(num_workers=2), world_size=2) == one
    assert draws(mine(), world_size=2, skip=8 if is_indexed else [8, 0]) == one[8:]
    if is_indexed:
        assert draws(mine(shuffle=True, num_workers=1), world_size=2) == draws(mine(shuffle=True)) != one
        assert draws(mine(shuffle=True), world_size=2, skip=8) == draws(mine(shuffle=True), skip=8)


@pytest.mark.parametrize("sampler", [BatchSampler(range(10), 4, False), [[0, 1], [2, 3]]], ids=type)
def test_a_sampler_of_lists_hands_the_data_set_whole_lists(sampler):
    """With batch_size=None, lists of indices are passed to __getitem__, not to __getitems__, as in plain PyTorch."""

    class Both(Columns):
        def __getitems__(self, indices):
            raise AssertionError("for batch samplers only")

    loader = DataLoader(Both(), sampler=sampler, batch_size=None)
    shards = [shard_loader(loader, key="valid", training=False, rank=rank, world_size=2, seed=0) for rank in range(2)]
    batches = [batch for shard in shards for batch in batches_of(shard)]
    assert sorted(each.tolist() for each in batches) == sorted(each.tolist() for each in loader)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    "data", [list(range(4)), Noisy(4), TensorDataset(torch.arange(4))], ids=lambda each: type(each).__name__
)
def test_an_empty_batch_is_handed_to_collate_fn(num_workers, data):
    """An empty batch is passed to collate_fn with and without workers, as in plain PyTorch."""
    loader = DataLoader(data, batch_sampler=[[0, 1], [], [2]], num_workers=num_workers, collate_fn=len)
    shard = share(loader, training=False)

    assert list(batches_of(shard)) == list(loader) == [2, 0, 1]


class Columns(Dataset):
    def __init__(self):
        self.values = torch.arange(10) * 3

    def __len__(self):
        return 10

    def __getitem__(self, indices):
        assert isinstance(indices, list)
        return self.values[indices]
