"""A stream, a custom loader or a sampler whose ``__len__`` is wrong: its true end counts."""

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from runnerkit import dl
from tests import tiny
from tests.tiny import classification, mlp, sgd, train_by_hand, weights

NUM_SAMPLES, BATCH = 46, 3  # 16 batches: 8 steps of two


class Claims(IterableDataset):
    """A stream that claims to have `length` samples."""

    def __init__(self, length):
        self.length, self.samples = length, classification(NUM_SAMPLES)

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.samples)


class Custom:
    """A loader that is not a DataLoader, and claims to have `length` samples."""

    def __init__(self, length):
        self.length, self.batches = length, list(DataLoader(classification(NUM_SAMPLES), BATCH))

    def __len__(self):
        return -(-self.length // BATCH)

    def __iter__(self):
        return iter(self.batches)


class Yields(Sampler):
    """A sampler, or a batch sampler, that claims to yield `length` items."""

    def __init__(self, length, items):
        self.length, self.items = length, items

    def __len__(self):
        return self.length

    def __iter__(self):
        return iter(self.items)


def sampled(length):
    return DataLoader(classification(NUM_SAMPLES), BATCH, sampler=Yields(length, range(NUM_SAMPLES)))


def in_batches(length):
    indices = list(range(NUM_SAMPLES))
    batches = [indices[start : start + BATCH] for start in range(0, NUM_SAMPLES, BATCH)]
    return DataLoader(classification(NUM_SAMPLES), batch_sampler=Yields(-(-length // BATCH), batches))


def stream(length, **kwargs):
    return DataLoader(Claims(length), BATCH, **kwargs)


def prefetched(length):
    return dl.BatchPrefetchLoaderWrapper(stream(length))


def train(batches, **options):
    runner = tiny.train(loaders={"train": batches}, **options)
    return runner, weights(runner.model)


def by_hand(step, *, num_epochs=1):
    """Train on slices of `step` samples; return the weights and the number of steps of an epoch."""
    model, samples = mlp(), classification(NUM_SAMPLES)
    steps = [samples[start : start + step] for start in range(0, NUM_SAMPLES, step)]
    train_by_hand(model, sgd(model), steps, num_epochs=num_epochs)
    return weights(model), len(steps)


@pytest.mark.parametrize("make", [stream, prefetched, Custom, sampled, in_batches])
@pytest.mark.parametrize("length", [28, 46, 61])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_all_batches_are_trained_on_and_the_last_ones_are_a_step(make, length, accumulate, caplog, recwarn):
    """One warning, of the loader, says that the length is wrong; torch's named a class of ours once in each batch."""
    runner, found = train(make(length), accumulation_steps=accumulate, num_epochs=2)

    expected, num_steps = by_hand(BATCH * accumulate, num_epochs=2)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert runner.optimizer_step == 2 * num_steps and runner.batch_step == 32
    assert len(recwarn) == 0
    is_wrong = length != NUM_SAMPLES
    assert caplog.text.count("loader 'train' gave 16 batches, but its length is") == is_wrong == len(caplog.messages)


def test_the_length_that_the_user_asked_for_is_not_warned_about_in_each_batch(recwarn):
    batches = stream(28)
    len(batches)

    train(batches)

    assert len(recwarn) == 0


@pytest.mark.parametrize("make", [stream, sampled])
@pytest.mark.parametrize("num_steps", [10, 13])
def test_a_limit_at_the_claimed_end_or_after_it_is_within_the_epoch(tmp_path, make, num_steps):
    """A run that stops there continues with the rest of the epoch."""
    train(make(28), num_steps=num_steps, num_epochs=2, logdir=tmp_path)

    runner, found = train(make(28), num_epochs=2, logdir=tmp_path, resume="auto")

    _, expected = train(make(NUM_SAMPLES), num_epochs=2)
    assert runner.batch_step == 32
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize(("make", "length"), [(stream, 28), (sampled, 61)])
def test_processes_take_the_steps_of_a_loader_with_a_wrong_length(make, length, capfd):
    _, found = train(make(length), accumulation_steps=3, num_processes=2)

    torch.testing.assert_close(found, by_hand(18)[0], rtol=0, atol=1e-6)
    assert capfd.readouterr().err.count("loader 'train' gave 8 batches") == 1
