"""A wrapped callback runs only where its condition holds, and otherwise equals its base."""

import pytest
import torch

from runnerkit.callback import EVENTS, Callback, CallbackNode, ICheckpointCallback
from runnerkit.callbacks.control.control_flow import CallbackWrapper, ControlFlowCallback
from tests.callbacks.recording import record


def note(event):
    """Make a hook that notes the event with the epoch and the loader."""
    return lambda self, runner: self.noted.append((event, runner.stage_epoch_step, runner.loader_key))


class Recorder(Callback):
    """A callback that notes its events."""

    provides = ("score",)
    requires = (("valid", "loss"),)
    on_experiment_start, on_experiment_end = note("on_experiment_start"), note("on_experiment_end")
    on_stage_start, on_stage_end = note("on_stage_start"), note("on_stage_end")
    on_batch_end, on_loader_end, on_epoch_end = note("on_batch_end"), note("on_loader_end"), note("on_epoch_end")

    def __init__(self):
        super().__init__(order=33, node=CallbackNode.Master)
        self.noted = []

    def of(self, event):
        return [(epoch, key) for each, epoch, key in self.noted if each == event]

    def state_dict(self):
        return {"count": len(self.noted)}

    def load_state_dict(self, state):
        self.noted = [None] * state["count"]


class Quiet(Recorder):
    requires = ()


def run(callback):
    loaders = {key: [torch.zeros(2, 1)] for key in ("train", "valid")}
    record(callback, loaders=loaders, num_epochs=4)


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
        ({"filter_fn": lambda s, e, k: e < 2 and k == "train"}, lambda e, k: (e, k) == (1, "train"), [1, 2, 3, 4]),
        ({"filter_fn": lambda e, k: e < 2 and k == "train"}, lambda e, k: (e, k) == (1, "train"), [1, 2, 3, 4]),
    ],
)
def test_it_acts_where_the_condition_holds(condition, expected, epochs):
    """Loader events follow the whole condition, epoch ends only its epochs; stage and experiment events always run."""
    recorder = Quiet()

    run(ControlFlowCallback(recorder, **condition))

    assert recorder.of("on_batch_end") == recorder.of("on_loader_end") == [each for each in ALL if expected(*each)]
    assert [epoch for epoch, _ in recorder.of("on_epoch_end")] == epochs
    others = [event for event, _, _ in recorder.noted if "experiment" in event or "stage" in event]
    assert others == ["on_experiment_start", "on_stage_start", "on_stage_end", "on_experiment_end"]


def test_wrapper_switched_off_hands_nothing_on():
    """No events are passed until the wrapper is enabled again."""
    recorder = Quiet()
    wrapper = CallbackWrapper(recorder, enable_callback=False)

    run(wrapper)
    assert recorder.noted == []
    wrapper.enable_callback = True
    run(wrapper)

    assert recorder.of("on_batch_end") == ALL


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
    runner = object()

    getattr(CallbackWrapper(base), event)(runner)

    assert seen == [runner]
