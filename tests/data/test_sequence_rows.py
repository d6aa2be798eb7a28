"""Truncated backpropagation through time: rows and hidden states continue, in any number of processes."""

import shutil
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.sampling.sharding import batches_of, share_of
from tests import tiny
from tests.data.places import share
from tests.engines.together import together
from tests.interrupt import Interrupt
from tests.tiny import sgd, weights

NUM_ROWS, LENGTH, VOCABULARY = 6, 5, 7
TEXT = torch.randint(VOCABULARY, (333,), generator=torch.Generator().manual_seed(0))


def rows():
    return dl.SequenceRows(TEXT, num_rows=NUM_ROWS, length=LENGTH)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_each_row_of_each_process_continues_where_it_ended(world_size):
    """Joined, a row is a contiguous part of the text."""
    part = len(TEXT) // NUM_ROWS
    for rank in range(world_size):
        own = share(DataLoader(rows(), batch_size=NUM_ROWS // world_size), rank, world_size)
        joined = torch.cat([batch[:, :-1] for batch in batches_of(own)], dim=1)
        for number, row in enumerate(joined):
            start = (rank + number * world_size) * part
            assert torch.equal(row, TEXT[start : start + len(row)])


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed, self.rnn = nn.Embedding(VOCABULARY, 6), nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, tokens, state):
        outputs, state = self.rnn(self.embed(tokens), state)
        return self.head(outputs), state


class Carrying(dl.Runner):
    def handle_batch(self, tokens):
        logits, self.hidden = self.model(tokens[:, :-1], self.hidden)
        self.batch_metrics["loss"] = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(logdir, *, num_processes=1, callbacks=(), **options):
    model, load = Network(), partial(DataLoader, rows(), batch_size=NUM_ROWS // num_processes)
    steps = [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss"), dl.CarriedStateCallback("hidden")]
    save = dl.CheckpointCallback(logdir, content="runner", every_steps=1)
    options |= {"loaders": {"train": load(), "valid": load()}, "callbacks": [*steps, save, *callbacks]}
    options |= {"optimizer": sgd(model, lr=0.5), "num_epochs": 2, "valid_every_steps": 4, "logdir": logdir}
    runner = tiny.train(model, runner=Carrying(), num_processes=num_processes, **options)
    return weights(model), runner.epoch_metrics


def by_hand():
    model = Network()
    optimizer = sgd(model, lr=0.5)
    for _ in range(2):
        state = None
        for tokens in DataLoader(rows(), batch_size=NUM_ROWS):
            optimizer.zero_grad()
            logits, state = model(tokens[:, :-1], state)
            state = tuple(each.detach() for each in state)
            nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    return weights(model)


def test_one_process_equals_a_hand_written_loop(tmp_path):
    """Validations within the epoch, which carry their own state, change nothing."""
    assert torch.equal(train(tmp_path)[0], by_hand())


@pytest.mark.parametrize("num_processes", [2, 3])
def test_processes_equal_one(tmp_path, num_processes):
    job = partial(train, tmp_path / "more", num_processes=num_processes)
    found, metrics = together(job, num_processes=num_processes)
    expected, of_one = train(tmp_path / "one")

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert metrics["valid"]["loss"] == pytest.approx(of_one["valid"]["loss"], abs=1e-6)


def test_a_run_resumes_within_an_epoch(tmp_path):
    """Its rows have their states, bit for bit, and also with another number of processes."""
    expected, _ = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "log", callbacks=[Interrupt(14)])
    (tmp_path / "log").rename(tmp_path / "first")
    for name in ("again", "two"):
        shutil.copytree(tmp_path / "first", tmp_path / name, symlinks=True)

    again, _ = train(tmp_path / "again", resume="auto")
    two, _ = together(lambda: train(tmp_path / "two", num_processes=2, resume="auto"))

    assert torch.equal(again, expected)
    torch.testing.assert_close(two, expected, rtol=0, atol=1e-6)


def test_what_is_too_short_is_named():
    with pytest.raises(ValueError, match=r"a sequence of 10 elements is too short for 4 rows of 5 \+ 1"):
        dl.SequenceRows(torch.arange(10), num_rows=4, length=5)


WRONG_ROWS = {
    "too many": ({"batch_size": 4}, "num_rows=2, but a step takes 4 samples"),
    "too few": ({"batch_size": 1}, "num_rows=2, but a step takes 1 samples"),
    "shuffled": ({"batch_size": 2, "shuffle": True}, "SequenceRows needs its order: omit shuffle and sampler"),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_rows_that_would_not_continue_are_refused(name):
    options, message = WRONG_ROWS[name]
    loader = DataLoader(dl.SequenceRows(torch.arange(20), num_rows=2, length=3), **options)

    with pytest.raises(ValueError, match=f"loader 'train': .*{message}"):
        share(loader)


def test_samples_that_end_within_a_chunk_are_refused():
    loader = DataLoader(dl.SequenceRows(torch.arange(20), num_rows=2, length=3), batch_size=2)

    with pytest.raises(ValueError, match="num_samples must be a multiple of the 2 samples of a step for this"):
        share_of(share(loader)).end_after(3)
