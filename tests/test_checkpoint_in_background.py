"""Tests that a checkpoint written by a thread holds the state at the save and is complete when the run ends."""

import threading

import pytest
import torch

from runnerkit import dl
from runnerkit.checkpoints.file import load_checkpoint
from runnerkit.checkpoints.folder import CheckpointFolder
from tests.interrupt import at
from tests.tiny import loader, train


def fit(folder, *callbacks, num_epochs=1, **options):
    checkpoint = dl.CheckpointCallback(folder, content="runner", asynchronous=True, **options)
    train(loaders={"train": loader(40, 4)}, callbacks=[checkpoint, *callbacks], num_epochs=num_epochs)


class WeightsByStep(dl.Callback):
    """Records the weights after each step, before a checkpoint is taken."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.Optimizer + 1)
        self.weights = {}

    def on_step_end(self, runner):
        self.weights[runner.batch_step] = {key: each.clone() for key, each in runner.model.state_dict().items()}


def test_steps_go_on_while_it_is_written_and_do_not_change_it(tmp_path, monkeypatch):
    """Even if writing takes longer than the steps between two saves, each file has the weights of its own step."""
    add, begun, noted = CheckpointFolder.add, [], WeightsByStep()

    def slow(folder, name, state, **what):
        begun.append((name, threading.current_thread() is threading.main_thread()))
        threading.Event().wait(0.2)
        return add(folder, name, state, **what)

    monkeypatch.setattr(CheckpointFolder, "add", slow)
    fit(tmp_path, noted, every_steps=3, keep_best=1)

    assert begun == [(f"model.0001.{step:08d}.pth", False) for step in (3, 6, 9)] + [("model.0001.pth", False)]
    for step in (9, 10):
        name = "model.0001.00000009.pth" if step == 9 else "model.0001.pth"
        saved = load_checkpoint(tmp_path / "checkpoints" / name)["model_state_dict"]
        assert all(torch.equal(saved[key], each) for key, each in noted.weights[step].items())


def test_what_keeps_it_from_being_written_is_raised_at_the_next_save(tmp_path, monkeypatch):
    """A write error is raised at the next save, not at the end of the run."""

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(CheckpointFolder, "add", full)
    noted = WeightsByStep()
    with pytest.raises(OSError, match="No space left"):
        fit(tmp_path, noted, every_steps=2)
    assert max(noted.weights) == 4


def test_it_is_written_when_the_run_ends_by_an_exception(tmp_path):
    """A checkpoint in progress is completed when an exception ends the run."""

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, at("on_epoch_start", lambda runner: 1 / (runner.epoch_step - 2), order=0), num_epochs=3)
    assert load_checkpoint(tmp_path / "checkpoints" / "last.pth")["counters"]["epoch_step"] == 1
