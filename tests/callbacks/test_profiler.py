"""A trace contains the requested steps and is written completely or not at all."""

import json

import pytest
import torch
from torch import nn
from torch.autograd.profiler import record_function

from runnerkit.callback import CallbackNode
from runnerkit.callbacks.monitor.profiler import ProfilerCallback
from runnerkit.engines import CPUEngine
from runnerkit.runner import IRunner


class MarkedRunner(IRunner):
    """A runner that marks each step in the trace."""

    def __init__(self, callback, *, num_batches=9, failing_at=None):
        super().__init__(nn.Linear(1, 1), CPUEngine())
        self.callback, self.num_batches, self.failing_at = callback, num_batches, failing_at

    def get_stage_len(self, stage):
        return 2

    def get_loaders(self, stage):
        return {"valid": [torch.zeros(2, 1)] * 3, "train": [torch.zeros(2, 1)] * self.num_batches}

    def get_callbacks(self, stage):
        return {"profiler": self.callback}

    def handle_batch(self, batch):
        if self.batch_step == self.failing_at:
            raise RuntimeError("broken step")
        with record_function(f"{self.loader_key} {self.epoch_step} {self.loader_batch_step}"):
            self.model(batch)


def marks(path):
    """Return the names of the marked steps, ordered by time."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
    return [name for name in names if name.startswith(("train", "valid"))]


@pytest.mark.parametrize(("num_batches", "steps"), [(5, range(2, 7)), (1, [2]), (100, range(2, 10))])
def test_trace_holds_the_first_training_steps_but_one(tmp_path, num_batches, steps):
    """Steps are those of the first epoch; a shorter loader gives a shorter trace."""
    path = tmp_path / "new" / "trace.json"

    MarkedRunner(ProfilerCallback(path, num_batches=num_batches)).run()

    assert marks(path) == [f"train 1 {step}" for step in steps]
    assert [each.name for each in path.parent.iterdir()] == ["trace.json"]


def test_the_trace_holds_the_models_operators_for_both_viewers(tmp_path):
    """The file contains the linear layer's operators, and TensorBoard gets a copy named *.pt.trace.json."""
    callback = ProfilerCallback(tmp_path / "trace.json", tensorboard=tmp_path / "tensorboard")

    MarkedRunner(callback).run()

    [copy] = (tmp_path / "tensorboard").iterdir()
    names = {event["name"] for event in json.loads(copy.read_text())["traceEvents"]}
    assert {"aten::linear", "aten::addmm"} <= names
    assert copy.name.endswith(".pt.trace.json")
    assert copy.read_bytes() == (tmp_path / "trace.json").read_bytes()


def test_exception_stops_the_profiler_and_leaves_no_file(tmp_path):
    """The next run in the same process can profile."""
    callback = ProfilerCallback(tmp_path / "trace.json")

    with pytest.raises(RuntimeError, match="broken step"):
        MarkedRunner(callback, failing_at=4).run()
    assert not list(tmp_path.iterdir())
    assert not torch.autograd.profiler._is_profiler_enabled
    MarkedRunner(ProfilerCallback(tmp_path / "trace.json", num_batches=2)).run()

    assert marks(tmp_path / "trace.json") == ["train 1 2", "train 1 3"]


def test_only_rank_zero_profiles():
    """Several ranks would corrupt one file."""
    assert ProfilerCallback("trace.json").node == CallbackNode.Master


def test_trace_of_nothing_is_refused():
    """The error is raised before training."""
    with pytest.raises(ValueError, match="num_batches must be >= 1, got 0"):
        ProfilerCallback("trace.json", num_batches=0)
