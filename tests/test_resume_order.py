"""A run that was interrupted within an epoch resumes in the order in which it began, or not at all."""

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, SequentialSampler

from runnerkit import dl
from tests.interrupt import Interrupt
from tests.tiny import classification, train

BATCH = 4


class Numbers(Dataset):
    """The data of `classification`, whose samples are noted when they are read."""

    def __init__(self, length):
        self.data, self.read = classification(length), []

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        self.read.append(index)
        return self.data[index]


def plain(length, **kwargs):
    return DataLoader(Numbers(length), BATCH, **kwargs)


def in_batches(length, *, size=BATCH, kind=RandomSampler):
    """Return a loader whose batch sampler is distributed whole."""

    class Batches(BatchSampler):
        pass

    data = Numbers(length)
    return DataLoader(data, batch_sampler=Batches(kind(data), size, drop_last=False))


def in_files(**options):
    data = classification(16)
    files = dl.ShardedFiles(
        range(4), lambda file: [data[4 * file + number] for number in range(4)], sizes=[4] * 4, **options
    )
    return DataLoader(files, BATCH)


def fit(logdir, batches, *, stop_at=None, **options):
    """Train for two epochs, with a checkpoint after every other step; `stop_at` interrupts the run in that step."""
    callbacks = [dl.CheckpointCallback(logdir, content="runner", every_steps=2)]
    if stop_at is not None:
        callbacks.append(Interrupt(stop_at))
    options = {"num_epochs": 2, "logdir": logdir, "resume": "auto", **options}
    return train(loaders={"train": batches}, callbacks=callbacks, **options)


def interrupt(logdir, batches, **options):
    with pytest.raises(KeyboardInterrupt):
        fit(logdir, batches, stop_at=3, **options)


CHANGES = {
    "grown": (plain(16, shuffle=True), plain(24, shuffle=True), "16 samples.*24 samples"),
    "shrunk": (plain(16), plain(12), "16 samples.*12 samples"),
    "shuffled": (plain(16), plain(16, shuffle=True), "SequentialSampler.*RandomSampler"),
    "no longer shuffled": (plain(16, shuffle=True), plain(16), "RandomSampler.*SequentialSampler"),
    "with replacement": (
        plain(16, shuffle=True),
        plain(16, sampler=RandomSampler(range(16), replacement=True)),
        r"RandomSampler\(replacement=True\)",
    ),
    "batches of another order": (in_batches(16), in_batches(16, kind=SequentialSampler), "4 batches.*Sequential"),
    "batches of another size": (in_batches(16), in_batches(16, size=2), "4 batches.*8 batches"),
    "tensors": (
        dl.TensorLoader(*classification(16).tensors, batch_size=BATCH),
        dl.TensorLoader(*classification(24).tensors, batch_size=BATCH),
        "16 samples.*24 samples",
    ),
    "lanes of files": (in_files(lanes=(2, 1)), in_files(lanes=(4, 1)), r"lanes=\(2, 1\).*lanes=\(4, 1\)"),
    "blocks of files": (in_files(shuffle=4), in_files(shuffle=2), "blocks=4.*blocks=2"),
}


@pytest.mark.parametrize("epoch_steps", [None, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_other_data_or_another_order_within_an_epoch_is_refused(tmp_path, change, epoch_steps):
    """Samples would be repeated and others missed; the error names both."""
    before, after, words = CHANGES[change]
    interrupt(tmp_path, before, epoch_steps=epoch_steps)

    with pytest.raises(ValueError, match=rf"(?s)middle of a pass over loader 'train'.*{words}.*repeated"):
        fit(tmp_path, after, epoch_steps=epoch_steps)


def test_another_seed_within_a_shuffled_epoch_is_refused(tmp_path):
    interrupt(tmp_path, plain(16, shuffle=True))

    with pytest.raises(ValueError, match="another seed"):
        fit(tmp_path, plain(16, shuffle=True), seed=1)


@pytest.mark.parametrize("epoch_steps", [None, 4])
def test_at_an_epochs_end_the_data_may_have_grown(tmp_path, epoch_steps):
    """All samples of the new data are read in the next epoch, once, as in a new run."""
    fit(tmp_path, plain(16), num_epochs=1, epoch_steps=epoch_steps)
    grown = plain(24, shuffle=True)

    fit(tmp_path, grown, epoch_steps=epoch_steps and 6)

    assert sorted(grown.dataset.read) == list(range(24))


@pytest.mark.parametrize("make", [lambda: plain(16), lambda: plain(16, shuffle=True), lambda: in_batches(16)])
def test_the_same_data_resume(tmp_path, make):
    """The interrupted run and its rest read each sample once an epoch; in another batch size, too."""
    first, rest = make(), make()
    interrupt(tmp_path, first)

    assert fit(tmp_path, rest).epoch_step == 2
    assert len(rest.dataset.read) == 8 + 16  # after the checkpoint of step 2


@pytest.mark.parametrize(
    ("before", "after"),
    [({"lanes": [2, 1], "shuffle": 2}, {"lanes": (2, 1), "shuffle": 2}), ({}, {"lanes": (1, 1)})],
    ids=["list and tuple", "default"],
)
def test_the_same_lanes_resume(tmp_path, before, after):
    interrupt(tmp_path, in_files(**before))

    assert fit(tmp_path, in_files(**after)).epoch_step == 2


def test_an_epoch_of_pieces_is_not_resumed_with_grown_data(tmp_path):
    """With `epoch_steps` a pass goes on after an epoch's end, which does not let its data grow either."""
    fit(tmp_path, plain(16), num_epochs=1, epoch_steps=3)

    with pytest.raises(ValueError, match=r"16 samples.*24 samples"):
        fit(tmp_path, plain(24), epoch_steps=3)


class Remembers(Sampler):
    """A sampler whose order depends on how often it was iterated over; `is_told` sets that at the start of an epoch."""

    def __init__(self, length, *, is_told):
        self.length, self.epoch = length, 0
        if is_told:
            self.set_epoch = lambda epoch: setattr(self, "epoch", epoch)

    def __len__(self):
        return self.length

    def __iter__(self):
        self.epoch += 1
        return iter(np.random.RandomState(self.epoch).permutation(self.length))


@pytest.mark.parametrize("epoch_steps", [None, 3])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_sampler_with_a_state_of_its_own_is_named(tmp_path, is_told, epoch_steps, caplog):
    """The rest of the second epoch is in the order of the first one, unless the sampler has a `set_epoch`."""

    def batches():
        return plain(16, sampler=Remembers(16, is_told=is_told))

    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, batches(), stop_at=7, num_epochs=3, epoch_steps=epoch_steps)
    loader = batches()
    fit(tmp_path, loader, num_epochs=3, epoch_steps=epoch_steps)

    assert caplog.text.count("in another order than before the interruption") == (not is_told)
    whole = batches()
    fit(tmp_path / "whole", whole, num_epochs=3, epoch_steps=epoch_steps)
    read = loader.dataset.read
    assert (read == whole.dataset.read[-len(read) :]) is is_told


@pytest.mark.parametrize("num_epochs", [1, 2])
@pytest.mark.parametrize("is_told", [True, False])
def test_the_state_of_a_sampler_is_missed_at_an_epochs_end_too(tmp_path, is_told, num_epochs, caplog):
    """A run that is resumed after an epoch is exact, as its order is listed again; later it is said that it is not."""

    def batches():
        return plain(16, sampler=Remembers(16, is_told=is_told))

    fit(tmp_path, batches(), num_epochs=num_epochs)
    loader, whole = batches(), batches()
    fit(tmp_path, loader, num_epochs=3)
    fit(tmp_path / "whole", whole, num_epochs=3)

    is_exact, read = is_told or num_epochs == 1, loader.dataset.read
    assert caplog.text.count("in another order than those of a run that was not interrupted") == (not is_exact)
    assert (read == whole.dataset.read[-len(read) :]) is is_exact


class Shuffles(Sampler):
    """A sampler of a user that draws from torch's generator."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(torch.randperm(self.length).tolist())


@pytest.mark.parametrize(
    ("first", "length", "rest"),
    [
        ({"num_epochs": 2}, 16, {}),
        ({"num_epochs": 2}, 24, {}),
        ({"num_epochs": 2}, 16, {"seed": 7}),
        ({"num_epochs": 3, "num_samples": 24}, 16, {}),
        ({"num_epochs": 3, "num_samples": 32}, 16, {}),
    ],
)
def test_a_sampler_without_a_state_is_not_doubted_after_an_epoch(tmp_path, first, length, rest, caplog):
    """Nor if the data or the seed are others now, or if a limit ended the run within an epoch."""

    def batches(length):
        return DataLoader(Numbers(length), BATCH, sampler=Shuffles(length))

    fit(tmp_path, batches(16), **first)
    fit(tmp_path, batches(length), num_epochs=4, **rest)

    assert "in another order" not in caplog.text


@pytest.mark.parametrize("make", [plain, in_batches])
def test_a_resumed_order_is_not_doubted(tmp_path, make, caplog):
    """Within an epoch that is shuffled, by samples or by whole batches."""
    shuffles = {"shuffle": True} if make is plain else {}
    interrupt(tmp_path, make(16, **shuffles))
    fit(tmp_path, make(16, **shuffles))
    assert "in another order" not in caplog.text
