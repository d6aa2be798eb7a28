"""Epochs of a given number of batches continue where the previous one ended, also in a resumed run."""

from itertools import count

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from runnerkit import dl
from runnerkit.sampling.sharding import batches_of, start_epoch
from tests import tiny
from tests.data.places import share
from tests.data.stream_sources import Divisible, hugging_face, webdataset
from tests.interrupt import Interrupt
from tests.tiny import NUM_CLASSES, NUM_FEATURES, mlp

STEPS, EPOCHS = 5, 4

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def labelled(sample):
    """Return features with noise, and a class; the sample is a number or a dict with one."""
    number = int(sample if isinstance(sample, int) else sample["n"] if "n" in sample else sample["txt"])
    return torch.linspace(0, 1, NUM_FEATURES) * (number % 7) + torch.rand(NUM_FEATURES), number % NUM_CLASSES


def collate(samples):
    features, targets = zip(*[each if isinstance(each, tuple) else each["pair"] for each in samples], strict=True)
    return torch.stack(features), torch.tensor(targets)


def paired(sample):
    return {"pair": labelled(sample)}


class Samples:
    """Map-style; 44 samples are 5.5 batches, so a pass ends within an epoch."""

    def __len__(self):
        return 44

    def __getitem__(self, index):
        return labelled(index)


class Endless(IterableDataset):
    """Cannot be divided, and never ends, unless it is given a `stop`."""

    def __init__(self, stop=None):
        self.stop = stop

    def __iter__(self):
        yield from map(labelled, count() if self.stop is None else range(self.stop))


SOURCES = {
    "map-style": lambda folder: Samples(),
    "endless": lambda folder: Endless(),
    "shards": lambda folder: Divisible(folder, labelled),
    "Hugging Face": lambda folder: hugging_face(folder, paired),
    "WebDataset": lambda folder: webdataset(folder, labelled),
}


def train(folder, logdir, source, *, callbacks=(), num_workers=0, batch_size=8, dropout=0.0, **options):
    arguments = {"shuffle": True, "drop_last": True} if source == "map-style" else {}
    loader = DataLoader(SOURCES[source](folder), batch_size, num_workers=num_workers, collate_fn=collate, **arguments)
    save = dl.CheckpointCallback(logdir, content="runner", every_steps=1)
    options = {"epoch_steps": STEPS, "num_epochs": EPOCHS, "callbacks": [save, *callbacks], **options}
    return tiny.train(mlp(dropout=dropout), loaders={"train": loader}, logdir=logdir, **options).model.state_dict()


def is_same(one, other, atol=0.0):
    return all(np.allclose(other[name], value, rtol=0, atol=atol) for name, value in one.items())


@pytest.mark.parametrize("source", SOURCES)
def test_an_interrupted_run_ends_with_the_same_weights(folder, tmp_path, source):
    """It resumes within an epoch, and between two, with other workers."""
    kind = {"source": source, "dropout": 0.3}
    expected = train(folder, tmp_path / "whole", num_workers=1, **kind)

    with pytest.raises(KeyboardInterrupt):
        train(folder, tmp_path / "log", callbacks=[Interrupt(2 * STEPS + 3)], num_workers=1, **kind)
    resumed = train(folder, tmp_path / "log", num_workers=2, resume="auto", **kind)
    train(folder, tmp_path / "half", num_epochs=2, **kind)
    continued = train(folder, tmp_path / "half", num_workers=1, resume="auto", **kind)

    assert is_same(expected, resumed)
    assert is_same(expected, continued)


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in ("map-style", "endless", "Hugging Face", "WebDataset")]


@pytest.mark.parametrize("source", ["shards", *SLOW])
def test_two_processes_train_like_one(folder, tmp_path, source):
    """A run of two processes continues one of one process, and the other way round."""
    one = train(folder, tmp_path / "one", source)
    train(folder, tmp_path / "more", source, num_epochs=2)

    more = train(folder, tmp_path / "more", source, batch_size=4, num_processes=2, resume="auto")
    train(folder, tmp_path / "less", source, num_epochs=2, batch_size=4, num_processes=2)
    less = train(folder, tmp_path / "less", source, num_workers=1, resume="auto")

    assert is_same(one, more, atol=1e-6)
    assert is_same(one, less, atol=1e-6)


def test_no_worker_outlives_the_run(folder, tmp_path):
    """The iterator lives from epoch to epoch, and ends with the run."""
    others = {*torch.multiprocessing.active_children()}
    train(folder, tmp_path / "log", "shards", num_workers=1)

    assert {*torch.multiprocessing.active_children()} <= others


def test_a_pass_may_be_shorter_than_an_epoch():
    """Short data are read several times in an epoch, in another order each time."""
    own = share(DataLoader(range(4), 2, shuffle=True), steps=5, epoch=None)

    seen = [sorted(torch.cat(list(own)[:4]).tolist()) for _ in range(2)]

    assert seen[0] == sorted([*range(4), *range(4)])
    assert len(list(own)) == len(own) == 5


def test_an_epoch_that_restarts_is_not_longer_than_the_data():
    """Its length is what schedules are told, and where accumulation ends."""
    assert len(dl.EpochStepsLoaderWrapper("abc", 5, restart=True)) == 3
    assert len(dl.EpochStepsLoaderWrapper("abc", 5)) == 5
    with pytest.raises(TypeError, match="does not have a length"):
        len(dl.EpochStepsLoaderWrapper(iter("abc"), 5, restart=True))


def test_each_epoch_may_restart():
    """Then epoch e has the first batches of the order of epoch e."""
    data = DataLoader(range(40), 4, shuffle=True)
    whole, cut = share(data), share(dl.EpochStepsLoaderWrapper(data, 3, restart=True))
    for epoch in (1, 2):
        start_epoch(whole, epoch)
        start_epoch(cut, epoch)
        expected = list(batches_of(whole))[:3]
        assert all(torch.equal(*each) for each in zip(cut, expected, strict=True))


@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_short_batches_count_their_own_samples(accumulation_steps):
    """A stream of three samples gives batches of three, so that 14 samples are five batches of one epoch."""
    stream = DataLoader(Endless(stop=3), batch_size=8, collate_fn=collate)
    options = {"accumulation_steps": accumulation_steps, "epoch_steps": 7, "num_samples": 14, "num_epochs": None}

    runner = tiny.train(mlp(), loaders={"train": stream}, **options)

    num_batches = {1: 5, 2: 6}[accumulation_steps]
    assert (runner.epoch_step, runner.batch_step, runner.sample_step) == (1, num_batches, 3 * num_batches)


@pytest.mark.parametrize(
    ("steps", "error", "message"),
    [
        (0, ValueError, "must be >= 1, got 0"),
        *((each, TypeError, f"must be an integer >= 1, got {each}") for each in (2.5, True)),
    ],
)
def test_wrong_numbers_are_refused(steps, error, message):
    """The error names the argument."""
    with pytest.raises(error, match=f"EpochStepsLoaderWrapper: epoch_steps {message}"):
        dl.EpochStepsLoaderWrapper([1], steps)


def test_numbers_of_numpy_are_numbers():
    """They are what a calculation with arrays gives."""
    two = np.int64(2)

    assert list(dl.EpochStepsLoaderWrapper("abc", two)) == list(dl.BatchLimitLoaderWrapper("abc", two)) == ["a", "b"]
    assert list(dl.BatchPrefetchLoaderWrapper([torch.zeros(1)], two)) == [torch.zeros(1)]


def test_an_empty_loader_is_named():
    """It would be read for ever."""
    with pytest.raises(ValueError, match="the loader gave no batch in pass 2"):
        list(dl.EpochStepsLoaderWrapper([], 3))


def test_a_run_without_epoch_steps_cannot_resume_with_them(folder, tmp_path):
    """Its position within an epoch means something else."""
    with pytest.raises(KeyboardInterrupt):
        train(folder, tmp_path / "log", "map-style", callbacks=[Interrupt(3)], epoch_steps=None)

    with pytest.raises(ValueError, match="without epoch_steps and cannot resume within it with epoch_steps=5"):
        train(folder, tmp_path / "log", "map-style", resume="auto")


@pytest.mark.parametrize("source", ["map-style", "endless", "shards"])
def test_a_run_with_epoch_steps_cannot_resume_without_them(folder, tmp_path, source):
    """Its position within an epoch means something else."""
    with pytest.raises(KeyboardInterrupt):
        train(folder, tmp_path / "log", source, callbacks=[Interrupt(3)])

    with pytest.raises(ValueError, match=r"'train': .* epoch with epoch_steps and cannot resume within it without"):
        train(folder, tmp_path / "log", source, resume="auto", epoch_steps=None)


def test_a_stream_with_other_lanes_is_named(folder, tmp_path):
    """Their places would be mixed up."""
    with pytest.raises(KeyboardInterrupt):
        train(folder, tmp_path / "log", "shards", callbacks=[Interrupt(3)])
    SOURCES["others"] = lambda folder: OtherLanes(folder, labelled)

    with pytest.raises(ValueError, match=r"loader 'train': its position was saved with lanes=\(4, 2\), and now it has"):
        train(folder, tmp_path / "log", "others", resume="auto")


class OtherLanes(Divisible):
    lanes = (2, 2)
