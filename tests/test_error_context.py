"""Tests that errors get a note with batch, loader, epoch and rank, and that loggers and callbacks are notified."""

import gc

import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.loop.error_context import is_out_of_memory
from runnerkit.seeding import generators
from tests.interrupt import at
from tests.tiny import loader, train

LOADERS = {"train": loader(32, 4), "valid": loader(8, 4)}


def notes_of(expected, **options):
    with pytest.raises(expected) as caught:
        train(**{"loaders": LOADERS, **options})
    return caught.value.__notes__


def fail_in(event):
    def fail(runner):
        if runner.batch_step == 3 or event != "on_batch_end":
            raise LookupError(f"in {event}")

    return at(event, fail, order=0)


class Refuses(dl.Callback):
    def on_exception(self, runner):
        raise OSError("nobody to tell")


@pytest.mark.parametrize(
    ("event", "place"),
    [
        ("on_batch_end", "in batch 3 of loader 'train', epoch 1, rank 0: features float32[4, 6], targets int64[4], l"),
        ("on_epoch_end", "after batch 2 of loader 'valid', epoch 1, rank 0"),
        ("on_stage_start", "before the first loader, rank 0"),
    ],
)
def test_an_exception_says_where_the_run_stood(event, place):
    """An exception in any event gets a note with its place in the run."""
    [note] = notes_of(LookupError, callbacks=[fail_in(event)])

    assert note.startswith(place)


def test_generators_that_cannot_be_restored_do_not_hide_the_error(monkeypatch):
    """After a failed assertion on a GPU, each further call fails."""

    def refuse(states):
        raise RuntimeError("device-side assert triggered")

    def fail(runner):
        monkeypatch.setattr(generators, "set_gpu_rng_states", refuse)
        raise LookupError

    [note] = notes_of(LookupError, callbacks=[at("on_epoch_end", fail)])

    assert "loader 'valid'" in note


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_that_cannot_be_fetched_is_named(num_workers):
    """If fetching a batch fails, the note names this batch, not the previous one."""

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            if index == 9:
                raise LookupError("sample 9")
            return torch.zeros(6), 0

    broken = torch.utils.data.DataLoader(Broken(), batch_size=4, num_workers=num_workers)

    notes = notes_of(LookupError, loaders={"valid": loader(8, 4), "train": broken})
    gc.collect()  # frees the loader's workers, which the traceback references

    assert notes[-1] == "while batch 3 of loader 'train', epoch 1, rank 0 was fetched"


class Several(nn.Linear):
    """Model that returns the logits and its input."""

    def forward(self, features):
        return super().forward(features), features


def test_what_a_criterion_cannot_take_is_seen_in_the_note():
    """The note shows tuple outputs and wrong target dtypes, which torch's message does not."""
    of_tuple = notes_of(TypeError, model=Several(6, 3))
    batches = [(torch.zeros(4, 6), torch.zeros(4, dtype=torch.int32))]
    of_int32 = notes_of((RuntimeError, IndexError), loaders={"train": batches})

    start = "in batch 1 of loader 'train', epoch 1, rank 0: features float32[4, 6], targets"
    assert of_tuple == [f"{start} int64[4], logits tuple of 2"]
    assert of_int32 == [f"{start} int32[4], logits float32[4, 3]"]


class Greedy(nn.Module):
    """Model that allocates more memory than available."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, features):
        return self.linear(features) + torch.empty(2**48).sum()


def test_out_of_memory_names_the_batch_and_what_needs_less():
    """Notes have the batch and advice that the run does not follow yet; in evaluation, none about training."""
    place, advice = notes_of(RuntimeError, model=Greedy())
    [_, of_evaluation] = notes_of(RuntimeError, model=Greedy(), loaders={"valid": loader(8, 4), "train": loader(8, 4)})
    in_bf16 = notes_of(RuntimeError, model=Greedy(), engine=dl.AMPEngine("cpu", dtype=torch.bfloat16))[1]

    assert place == "in batch 1 of loader 'train', epoch 1, rank 0: features float32[4, 6], targets int64[4]"
    assert advice.startswith(
        "out of memory on cpu on a batch of features float32[4, 6], targets int64[4]. To use less:"
    )
    for words in ("batch_size", "accumulation_steps", "amp=True", "checkpoint_modules=[Block]", "FullyShardedData"):
        assert words in advice
    assert "amp=True" not in in_bf16
    assert of_evaluation.endswith("To use less: a smaller batch_size")


def test_what_is_no_lack_of_memory_gets_no_advice():
    """Only errors of the allocator count as out of memory."""
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("DefaultCPUAllocator: not enough memory"))


class Log(dl.ILogger):
    """Logger that records whether it was closed."""

    is_essential = True

    def __init__(self, *, log_fails=False, close_fails=False):
        self.log_fails, self.close_fails = log_fails, close_fails
        self.is_closed = False

    def log_scalars(self, scalars, *, step, scope):
        if self.log_fails:
            raise ConnectionError("the service is away")

    def close(self):
        self.is_closed = True
        if self.close_fails:
            raise TimeoutError("and stays away")


def test_a_callback_that_fails_on_the_exception_hides_nothing():
    """If on_exception fails, the others are still called, loggers are closed, and the first error gets a note."""
    told, log = [], Log()

    tell = [at("on_exception", lambda runner: told.append(runner.exception), order=order) for order in (2, 4)]
    callbacks = [fail_in("on_batch_end"), *tell, Refuses(order=1), Refuses(order=3)]
    notes = notes_of(LookupError, callbacks=callbacks, loggers={"log": log})

    assert [str(each) for each in told] == ["in on_batch_end"] * 2
    assert notes[1:] == ["Refuses.on_exception raised OSError('nobody to tell')"] * 2
    assert log.is_closed


def test_a_logger_that_fails_keeps_no_other_open():
    """A logger that fails does not keep the others open, and its first error is raised."""
    logs = {"first": Log(), "bad": Log(log_fails=True, close_fails=True), "last": Log()}
    told = []
    tell = at("on_exception", lambda runner: told.append(runner.exception))

    notes = notes_of(ConnectionError, loggers=logs, callbacks=[tell])

    assert all(log.is_closed for log in logs.values())
    assert [str(each) for each in told] == ["the service is away"]
    closing = "Log.close raised TimeoutError('and stays away')"
    assert notes == ["after batch 8 of loader 'train', epoch 1, rank 0", closing]


def test_a_logger_that_cannot_be_closed_ends_a_good_run_with_its_exception():
    """An essential logger that cannot be closed ends a successful run with its error: logs may be incomplete."""
    logs = {"bad": Log(close_fails=True), "last": Log()}

    with pytest.raises(TimeoutError, match="and stays away"):
        train(loggers=logs)

    assert logs["last"].is_closed
