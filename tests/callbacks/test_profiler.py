"""A trace contains the requested steps and is written completely or not at all."""

import json

import pytest
import torch
from torch.autograd.profiler import record_function

from runnerkit.callback import CallbackNode
from runnerkit.callbacks.monitor.profiler import ProfilerCallback
from tests.callbacks.recording import Recording, record
from tests.tiny import loader, train


class Marked(Recording):
    """A runner that marks each step in the trace."""

    def __init__(self, failing_at):
        super().__init__()
        self.failing_at = failing_at

    def handle_batch(self, batch):
        if self.batch_step == self.failing_at:
            raise RuntimeError("broken step")
        with record_function(f"{self.loader_key} {self.epoch_step} {self.loader_batch_step}"):
            self.model(batch)


def run(callback, *, failing_at=None, num_steps=9):
    loaders = {"valid": [torch.zeros(2, 1)] * 3, "train": [torch.zeros(2, 1)] * num_steps}
    return record(callback, runner=Marked(failing_at), loaders=loaders, num_epochs=2)


def marks(path):
    """Return the names of the marked steps, ordered by time."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
    return [name for name in names if name.startswith(("train", "valid"))]


@pytest.mark.parametrize(("num_batches", "steps"), [(5, range(2, 7)), (1, [2]), (100, range(2, 10))])
def test_trace_holds_the_first_training_steps_but_one(tmp_path, num_batches, steps):
    """Steps are those of the first epoch; a shorter loader gives a shorter trace."""
    path = tmp_path / "new" / "trace.json"

    run(ProfilerCallback(path, num_batches=num_batches))

    assert marks(path) == [f"train 1 {step}" for step in steps]
    assert [each.name for each in path.parent.iterdir()] == ["trace.json"]


def test_the_trace_of_a_loader_with_one_batch_is_of_the_second_epoch(tmp_path):
    """The first step is skipped; the evaluation between the epochs is left out."""
    run(ProfilerCallback(tmp_path / "trace.json"), num_steps=1)

    assert marks(tmp_path / "trace.json") == ["train 2 1"]


def test_a_run_of_one_step_says_that_it_has_no_trace(tmp_path, caplog):
    train(loaders={"train": loader(4, 4)}, callbacks=[ProfilerCallback(tmp_path / "trace.json")])

    assert not (tmp_path / "trace.json").exists()
    assert "no second training step" in caplog.text


def test_the_trace_holds_the_models_operators_for_both_viewers(tmp_path):
    """The file contains the linear layer's operators, and TensorBoard gets a copy named *.pt.trace.json."""
    callback = ProfilerCallback(tmp_path / "trace.json", tensorboard=tmp_path / "tensorboard")

    run(callback)

    [copy] = (tmp_path / "tensorboard").iterdir()
    names = {event["name"] for event in json.loads(copy.read_text())["traceEvents"]}
    assert {"aten::linear", "aten::addmm"} <= names
    assert copy.name.endswith(".pt.trace.json")
    assert copy.read_bytes() == (tmp_path / "trace.json").read_bytes()


def test_exception_stops_the_profiler_and_leaves_no_file(tmp_path):
    """The next run in the same process can profile."""
    callback = ProfilerCallback(tmp_path / "trace.json")

    with pytest.raises(RuntimeError, match="broken step"):
        run(callback, failing_at=4)
    assert not list(tmp_path.iterdir())
    assert not torch.autograd.profiler._is_profiler_enabled
    run(ProfilerCallback(tmp_path / "trace.json", num_batches=2))

    assert marks(tmp_path / "trace.json") == ["train 1 2", "train 1 3"]


def test_only_rank_zero_profiles():
    """Several ranks would corrupt one file."""
    assert ProfilerCallback("trace.json").node == CallbackNode.Master
