"""A run that was interrupted within an epoch resumes in the order in which it began, or not at all."""

import pytest
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from runnerkit import dl
from tests.interrupt import Interrupt
from tests.tiny import classification, mlp, quiet, sgd

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


def train(logdir, batches, *, stop_at=None, **kwargs):
    """Train for two epochs, with a checkpoint after every other step; `stop_at` interrupts the run in that step."""
    model = mlp()
    options = {"num_epochs": 2, "cpu": True, **quiet(), **kwargs}
    if stop_at is not None:
        options["callbacks"] = [Interrupt(stop_at)]
    saves = dl.CheckpointCallback(logdir, mode="runner", every_steps=2)
    return dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={"train": batches}, logdir=logdir,
        resume="auto", **{**options, "callbacks": [saves, *options.get("callbacks", ())]},
    )  # fmt: skip


def interrupt(logdir, batches, *, stop_at, **kwargs):
    with pytest.raises(KeyboardInterrupt):
        train(logdir, batches, stop_at=stop_at, **kwargs)


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
}


@pytest.mark.parametrize("epoch_steps", [None, 3])
@pytest.mark.parametrize("change", CHANGES)
def test_other_data_or_another_order_within_an_epoch_is_refused(tmp_path, change, epoch_steps):
    """Samples would be repeated and others missed; the error names both."""
    before, after, words = CHANGES[change]
    interrupt(tmp_path, before, stop_at=3, epoch_steps=epoch_steps)

    with pytest.raises(ValueError, match=rf"(?s)middle of a pass over loader 'train'.*{words}.*repeated"):
        train(tmp_path, after, epoch_steps=epoch_steps)


def test_another_seed_within_a_shuffled_epoch_is_refused(tmp_path):
    interrupt(tmp_path, plain(16, shuffle=True), stop_at=3)

    with pytest.raises(ValueError, match="another seed"):
        train(tmp_path, plain(16, shuffle=True), seed=1)


@pytest.mark.parametrize("epoch_steps", [None, 4])
def test_at_an_epochs_end_the_data_may_have_grown(tmp_path, epoch_steps):
    """All samples of the new data are read in the next epoch, once, as in a new run."""
    train(tmp_path, plain(16), num_epochs=1, epoch_steps=epoch_steps)
    grown = plain(24, shuffle=True)

    train(tmp_path, grown, num_epochs=2, epoch_steps=epoch_steps and 6)

    assert sorted(grown.dataset.read) == list(range(24))


@pytest.mark.parametrize("make", [lambda: plain(16), lambda: plain(16, shuffle=True), lambda: in_batches(16)])
def test_the_same_data_resume(tmp_path, make):
    """The interrupted run and its rest read each sample once an epoch; in another batch size, too."""
    first, rest = make(), make()
    interrupt(tmp_path, first, stop_at=3)

    runner = train(tmp_path, rest)

    assert runner.epoch_step == 2
    assert len(rest.dataset.read) == 8 + 16  # after the checkpoint of step 2


def test_an_epoch_of_pieces_is_not_resumed_with_grown_data(tmp_path):
    """With `epoch_steps` a pass goes on after an epoch's end, which does not let its data grow either."""
    train(tmp_path, plain(16), num_epochs=1, epoch_steps=3)

    with pytest.raises(ValueError, match=r"16 samples.*24 samples"):
        train(tmp_path, plain(24), num_epochs=2, epoch_steps=3)
