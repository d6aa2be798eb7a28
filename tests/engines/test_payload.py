"""Functions on their way to other processes: what cannot travel is named by the path that leads to it."""

import threading
from functools import partial

import pytest
import torch
from torch import nn

from runnerkit.engines.payload import pack, unpack

LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.parts = [1, threading.Lock()]

    def method(self):
        return self.parts


def closure():
    lock = threading.Lock()
    return lambda: lock


def with_a_global():
    return LOCK


with_a_global.__module__ = "__main__"  # pickled by value, with the globals that it uses


@pytest.mark.parametrize(
    ("value", "path"),
    [
        (partial(print, threading.Lock()), "runner"),
        (partial(print, file={"a": threading.Lock()}), r"runner -> file\['a'\]"),
        (Holder().method, r"runner\.parts\[1\]"),
        (closure(), "runner -> lock"),
        (with_a_global, "runner -> LOCK"),
    ],
    ids=["a partial's argument", "a partial's keyword", "a method's object", "a closure", "a global"],
)
def test_what_cannot_be_sent_is_named_by_its_path(value, path):
    """In partials, methods and functions, with what to do about it."""
    with pytest.raises(TypeError, match=rf"^{path} is a lock and cannot be sent .*make it where it is used"):
        pack(value)


def test_a_lambda_arrives_as_it_was():
    """With what it refers to."""
    factor = 3

    assert unpack(pack(lambda x: factor * x))(2) == 6


class Counting(torch.optim.SGD):
    """An optimizer with attributes of its own, which ``Optimizer.__getstate__`` does not return."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.largest = self.param_groups[0]["params"][0]
        self.handle = None


@pytest.mark.parametrize(
    ("make", "name"), [(torch.optim.LBFGS, "_params"), (Counting, "largest")], ids=["LBFGS", "a user's own"]
)
def test_an_optimizer_arrives_with_the_attributes_of_its_class(make, name):
    """Parameters among them are still the model's; hooks and a scheduler's patch of `step` stay behind."""
    model = nn.Linear(2, 1)
    optimizer = make(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    copy, steps, scheduler = unpack(pack((model, optimizer, scheduler)))

    kept = getattr(steps, name)
    assert (kept[0] if isinstance(kept, list) else kept) is next(copy.parameters())
    assert scheduler.optimizer is steps and "step" not in vars(steps)
    before = copy.weight.detach().clone()
    loss = copy(torch.ones(1, 2)).sum()
    loss.backward()
    steps.step(lambda: loss)
    assert not torch.equal(copy.weight, before)


def test_an_attribute_of_an_optimizer_that_cannot_travel_stays_behind(caplog):
    """The optimizer still arrives, as it does by plain pickle, and a warning names the reason."""
    optimizer = Counting(nn.Linear(2, 1).parameters(), lr=0.1)
    optimizer.handle = threading.Lock()

    copy = unpack(pack(optimizer))

    assert not hasattr(copy, "handle") and copy.param_groups[0]["lr"] == 0.1
    assert "lock" in caplog.text
