"""The finder returns the largest batch size that fits, however memory runs out, and restores all state."""

import copy
import random
from collections import UserDict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

from runnerkit import dl
from tests.tiny import loader, mlp, train, weights

OUT_OF_MEMORY = {
    "cuda": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    "cpu": RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
}


class Limited(nn.Module):
    """A model that runs out of memory above a number of rows, in the forward or the backward pass."""

    def __init__(self, limit, *, limits=(), error=OUT_OF_MEMORY["cuda"], in_backward=False):
        super().__init__()
        self.inner = mlp(batch_norm=True, dropout=0.3)
        self.limit, self.limits, self.error, self.in_backward = limit, limits, error, in_backward
        self.seen = []

    def forward(self, features):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        self.seen.append(len(features))
        logits = self.inner(features)
        if len(features) > (self.limits[rank] if self.limits else self.limit):
            if not self.in_backward:
                raise self.error
            logits.register_hook(self.fail)
        return logits

    def fail(self, _):
        raise self.error


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.1)


def find(finder, model, *, optimizer="adam", num_samples=400, callbacks=(), **options):
    optimizer = adam(model) if optimizer == "adam" else optimizer
    loaders = {"train": loader(num_samples, 4, shuffle=True), "valid": loader(8, 4)}
    return train(model, optimizer=optimizer, loaders=loaders, callbacks=[finder, *callbacks], num_epochs=2, **options)


@pytest.mark.parametrize(("kind", "in_backward"), [("cuda", False), ("cuda", True), ("cpu", False)])
@pytest.mark.parametrize("limit", [2, 37, 64, 127])
def test_the_largest_that_fits_is_found(limit, kind, in_backward):
    """Doubling and bisecting tries each size once."""
    finder, model = dl.BatchSizeFinder(), Limited(limit, error=OUT_OF_MEMORY[kind], in_backward=in_backward)

    runner = find(finder, model)

    assert finder.batch_size == limit
    assert finder.tried == {size: size <= limit for size in finder.tried}
    assert len(finder.tried) <= 2 * limit.bit_length() + 1
    assert model.seen.count(limit) == 3, "num_steps is 3 by default"
    assert runner.epoch_metrics == {} and runner.batch_step == 0


@pytest.mark.parametrize(("max_size", "found"), [(None, 48), (100, 100), (20, 20)])
def test_without_a_limit_the_search_ends(max_size, found):
    """The search ends at the number of samples in an epoch or at `max_size`."""
    finder = dl.BatchSizeFinder(max_size=max_size)

    find(finder, Limited(10_000), num_samples=48)

    assert finder.batch_size == found


@dataclass
class Both:
    features: torch.Tensor
    targets: torch.Tensor


Pair = namedtuple("Pair", "features targets")


class Own(dl.Runner):
    def handle_batch(self, batch):
        if isinstance(batch, Mapping):
            batch = Pair(**batch)
        logits = self.model(batch.features)
        self.batch_metrics["loss"] = self.criterion(logits, batch.targets)


@pytest.mark.parametrize("kind", [UserDict, Both, Pair])
def test_batches_of_any_container_are_enlarged(kind):
    """Of mappings such as tokenizers return, named tuples and dataclasses."""
    finder, model = dl.BatchSizeFinder(), Limited(37)
    loaders = {"train": loader(400, 4, collate_fn=lambda samples: made(kind, *default_collate(samples)))}
    steps = [dl.BackwardCallback("loss"), dl.OptimizerCallback("loss")]

    train(model, runner=Own(), optimizer=adam(model), loaders=loaders, callbacks=[finder, *steps])

    assert finder.batch_size == 37


def made(kind, features, targets):
    values = {"features": features, "targets": targets}
    return kind(values) if kind is UserDict else kind(**values)


@pytest.mark.parametrize(
    "precision", [None, dl.AMP(torch.float16, scaler={"init_scale": 2.0**40})], ids=["fp32", "scaler"]
)
def test_everything_is_as_it_was_before(precision):
    """Weights, buffers, moments, generators and gradients are restored, so later callbacks draw the same numbers."""
    model = Limited(21, in_backward=True)
    optimizer = adam(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    before, moments, untouched = weights(model), copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    note = dl.CPUEngine(precision=copy.deepcopy(precision))

    draws = []

    class Draw(dl.Callback):
        def __init__(self, order):
            super().__init__(order=order)

        def on_stage_start(self, runner):
            draws.append((torch.rand(1).item(), random.random(), np.random.rand()))

    find(dl.BatchSizeFinder(), model, optimizer=optimizer, engine=note, callbacks=[Draw(0), Draw(1000)])
    searched = list(draws)
    draws.clear()
    find(dl.CheckRunCallback(), untouched, callbacks=[Draw(0), Draw(1000)])

    assert torch.equal(weights(model), before)
    assert all(each.grad is None for each in model.parameters())
    state = optimizer.state_dict()
    assert state["param_groups"] == moments["param_groups"]
    for name, each in moments["state"].items():
        assert all(torch.equal(value, state["state"][name][key]) for key, value in each.items())
    assert searched == draws


def test_a_fresh_optimizer_is_fresh_again():
    """Adam's state is empty again, as before its first step."""
    model = Limited(5)
    optimizer = adam(model)

    find(dl.BatchSizeFinder(), model, optimizer=optimizer)

    assert optimizer.state_dict()["state"] == {}


def test_accumulated_steps_are_made_too():
    """Each trial makes an optimizer step despite gradient accumulation, and the run's callbacks keep their state."""
    steps = []
    model = Limited(9)
    optimizer = adam(model)
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    stepper = dl.OptimizerCallback("loss", accumulation_steps=4)
    finder = dl.BatchSizeFinder(num_steps=2)

    find(finder, model, optimizer=optimizer, callbacks=[stepper])

    assert len(steps) == 2 * sum(finder.tried.values())
    assert stepper.num_pending == 0


def test_two_processes_agree_on_the_smaller_one():
    """A size that fails on one rank counts as failed on all, and no rank waits for another in the middle of a step."""
    finder = dl.BatchSizeFinder()

    find(finder, Limited(0, limits=(19, 11)), engine=dl.DistributedDataParallelEngine(2, device="cpu", timeout_s=60))

    assert finder.batch_size == 11
    assert finder.tried[16] is False


def test_another_error_is_raised():
    """Only errors about memory are handled."""
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        find(dl.BatchSizeFinder(), Limited(6, error=RuntimeError("mat1 and mat2 shapes cannot be multiplied")))


def test_a_first_size_that_does_not_fit_is_refused():
    """The error names the size and the device."""
    with pytest.raises(RuntimeError, match="a step with 4 rows already runs out of memory on cpu"):
        find(dl.BatchSizeFinder(start=4), Limited(3))
