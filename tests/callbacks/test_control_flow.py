"""A wrapped callback runs only where its condition holds, and otherwise equals its base."""

import pytest
import torch
from torch import nn

from runnerkit.callback import EVENTS, Callback, CallbackNode, ICheckpointCallback
from runnerkit.callbacks.control.control_flow import CallbackWrapper, ControlFlowCallback
from runnerkit.engines import CPUEngine
from runnerkit.runner import IRunner


class Recorder(Callback):
    """A callback that records the (epoch, loader) of each call."""

    provides = ("score",)
    requires = (("valid", "loss"),)

    def __init__(self):
        super().__init__(order=33, node=CallbackNode.Master)
        self.batches, self.loader_ends, self.epochs, self.others = [], [], [], []

    def on_experiment_start(self, runner):
        self.others.append("on_experiment_start")

    def on_stage_start(self, runner):
        self.others.append("on_stage_start")

    def on_epoch_end(self, runner):
        self.epochs.append(runner.stage_epoch_step)

    def on_batch_end(self, runner):
        self.batches.append((runner.stage_epoch_step, runner.loader_key))

    def on_loader_end(self, runner):
        self.loader_ends.append((runner.stage_epoch_step, runner.loader_key))

    def on_stage_end(self, runner):
        self.others.append("on_stage_end")

    def on_experiment_end(self, runner):
        self.others.append("on_experiment_end")

    def state_dict(self):
        return {"count": len(self.batches)}

    def load_state_dict(self, state):
        self.batches = [None] * state["count"]


class TwoLoaders(IRunner):
    """A runner with four epochs of one batch in each of two loaders."""

    def __init__(self, callback):
        super().__init__(nn.Linear(1, 1), CPUEngine())
        self.callback = callback

    def get_stage_len(self, stage):
        return 4

    def get_loaders(self, stage):
        return {"train": [torch.zeros(2, 1)], "valid": [torch.zeros(2, 1)]}

    def get_callbacks(self, stage):
        return {"callback": self.callback}

    def handle_batch(self, batch):
        self.batch_metrics["loss"] = 1.0


class Quiet(Recorder):
    requires = ()


ALL = [(epoch, key) for epoch in (1, 2, 3, 4) for key in ("train", "valid")]


@pytest.mark.parametrize(
    ("condition", "expected", "epochs"),
    [
        ({"epochs": 2}, lambda e, k: e in (2, 4), [2, 4]),
        ({"epochs": 3.0}, lambda e, k: e == 3, [3]),
        ({"epochs": [1, 4]}, lambda e, k: e in (1, 4), [1, 4]),
        ({"ignore_epochs": 2}, lambda e, k: e in (1, 3), [1, 3]),
        ({"ignore_epochs": (1, 4)}, lambda e, k: e in (2, 3), [2, 3]),
        ({"loaders": "train"}, lambda e, k: k == "train", [1, 2, 3, 4]),
        ({"loaders": ["valid"]}, lambda e, k: k == "valid", [1, 2, 3, 4]),
        ({"loaders": {"train": [2, 3], "valid": 3}}, lambda e, k: e == 3 or (e, k) == (2, "train"), [2, 3]),
        ({"ignore_loaders": "train"}, lambda e, k: k == "valid", [1, 2, 3, 4]),
        ({"ignore_loaders": {"train": [1, 2]}}, lambda e, k: k == "valid" or e > 2, [1, 2, 3, 4]),
        (
            {"filter_fn": lambda s, e, k: e % 2 == 1 and k == "train"},
            lambda e, k: e in (1, 3) and k == "train",
            [1, 2, 3, 4],
        ),
    ],
)
def test_it_acts_where_the_condition_holds(condition, expected, epochs):
    """Loader events follow the whole condition, epoch ends only its epochs; stage and experiment events always run."""
    recorder = Quiet()

    TwoLoaders(ControlFlowCallback(recorder, **condition)).run()

    assert recorder.batches == [each for each in ALL if expected(*each)]
    assert recorder.loader_ends == recorder.batches
    assert recorder.epochs == epochs
    assert recorder.others == ["on_experiment_start", "on_stage_start", "on_stage_end", "on_experiment_end"]


def test_wrapper_switched_off_hands_nothing_on():
    """No events are passed until the wrapper is enabled again."""
    recorder = Quiet()
    wrapper = CallbackWrapper(recorder, enable_callback=False)

    TwoLoaders(wrapper).run()
    assert (recorder.batches, recorder.others) == ([], [])
    wrapper.enable_callback = True
    TwoLoaders(wrapper).run()

    assert recorder.batches == ALL


def test_wrapper_is_its_base_in_all_but_events():
    """The wrapper has the base's order, node, metric names and state, so it can replace the base anywhere."""
    base = Recorder()
    wrapper = ControlFlowCallback(base, epochs=1)

    wrapper.load_state_dict({"count": 3})

    assert (wrapper.order, wrapper.node) == (33, CallbackNode.Master)
    assert (wrapper.provides, wrapper.requires) == (("score",), (("valid", "loss"),))
    assert wrapper.state_dict() == {"count": 3}
    assert wrapper.callback is base


def test_wrapper_listens_to_what_its_base_listens_to():
    """Events that the base does not override are not called."""
    wrapper = CallbackWrapper(Recorder())

    heard = [event for event in EVENTS if wrapper.listens_to(event)]

    assert heard == [event for event in EVENTS if event in vars(Recorder)]


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_is_handed_on(event):
    """Each event is passed on with the runner."""
    seen = []
    base = type("Base", (ICheckpointCallback,), {event: lambda self, runner: seen.append(runner)})()
    runner = TwoLoaders(None)

    getattr(CallbackWrapper(base), event)(runner)

    assert seen == [runner]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, "pass exactly one of epochs, ignore_epochs, loaders, ignore_loaders, filter_fn; got none"),
        ({"epochs": 1, "loaders": "train"}, ValueError, "pass exactly one of .*; got epochs, loaders"),
        ({"epochs": 0}, ValueError, "epochs=N stands for every N-th epoch and must be >= 1, got 0"),
        ({"epochs": "1"}, TypeError, "epochs must be a number or a list of epochs, got '1'"),
        ({"ignore_loaders": 3}, TypeError, "ignore_loaders must be a loader key, a list or a dict of them, got 3"),
        (
            {"filter_fn": "lambda s, e, l: True"},
            TypeError,
            "filter_fn must be a function of stage, epoch and loader, got 'lambda",
        ),
    ],
)
def test_bad_condition_is_refused(arguments, error, message):
    """The error is raised before training."""
    with pytest.raises(error, match=message):
        ControlFlowCallback(Recorder(), **arguments)


def test_only_a_callback_can_be_wrapped():
    """Passing a class instead of an object is an easy mistake."""
    with pytest.raises(TypeError, match="base_callback must be a runnerkit Callback, got <class"):
        CallbackWrapper(Recorder)
