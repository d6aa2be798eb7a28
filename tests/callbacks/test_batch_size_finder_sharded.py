"""The batch-size finder with FSDP2: no process waits for one that ran out of memory, and all state is as before."""

import pytest
import torch
from torch import nn

from runnerkit import dl, utils
from runnerkit.engines.sharding.trial_models import offloaded
from tests.engines.together import together
from tests.tiny import NUM_CLASSES, NUM_FEATURES, loader, train

LIMITS = (37, 11, 64, 90)  # rows that fit, by rank


class Limit(nn.Module):
    """A layer that runs out of memory, on one rank earlier than on others, in the forward or the backward pass."""

    def __init__(self, *, in_backward):
        super().__init__()
        self.in_backward = in_backward

    def forward(self, hidden):
        """Return `hidden`, (N, width)."""
        if len(hidden) > LIMITS[torch.distributed.get_rank()]:
            if not self.in_backward:
                self.fail()
            hidden.register_hook(self.fail)
        return hidden

    def fail(self, *_):
        """Raise what torch raises."""
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def make(*, on_meta=False, in_backward=False):
    layers = {
        "up": nn.Linear(NUM_FEATURES, 18),
        "limit": Limit(in_backward=in_backward),
        "dropout": nn.Dropout(0.3),
        "down": nn.Linear(18, 9),
        "norm": nn.BatchNorm1d(9),
        "head": nn.Linear(9, NUM_CLASSES),
    }
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    if on_meta:
        for layer in model.modules():
            for name, each in layer.named_parameters(recurse=False):
                setattr(layer, name, nn.Parameter(each.detach().to("meta")))
        return model
    return utils.initialize_parameters(model, seed=42)


class Continue(dl.BatchSizeFinder):
    """A finder after which the stage trains, so that what it changed would show."""

    def on_stage_start(self, runner):
        """Search, and let the stage have its epochs."""
        num_epochs = runner.stage_epoch_len
        super().on_stage_start(runner)
        runner.stage_epoch_len = num_epochs


class Final(dl.Callback):
    """A callback that keeps the state at the end of the stage."""

    def __init__(self):
        super().__init__(order=dl.CallbackOrder.External + 2)
        self.state = {}

    def on_stage_end(self, runner):
        """Gather weights and moments."""
        engine, model = runner.engine, runner.current_run.stage.training_model
        engine.training_model(model)
        state = engine.model_state_dict(model, whole=False), engine.optimizer_state_dict(runner.optimizer, whole=False)
        self.state = engine.whole_state(state)


def find(engine, *, searches=True, in_backward=False, model=None, **kwargs):
    model = model or make(on_meta=engine.never_whole, in_backward=in_backward)
    finder, final = Continue(max_size=100), Final()
    callbacks = [final, *([finder] if searches else [])]
    loaders, optimizer = {"train": loader(40, 4, shuffle=True)}, torch.optim.Adam(model.parameters(), lr=0.1)
    train(model, engine=engine, optimizer=optimizer, loaders=loaders, callbacks=callbacks, num_epochs=2, **kwargs)
    return finder.batch_size, finder.tried, final.state


def fsdp(num_processes, **kwargs):
    arguments = {"device": "cpu", "timeout_s": 30, "shard_modules": [nn.Linear], **kwargs}
    return dl.FullyShardedDataParallelEngine(num_processes, **arguments)


ENGINES = {
    2: {
        "shards": {},
        "meta": {"init": "meta"},
        "cpu_offload": {"cpu_offload": True},
        "scaler": {"precision": dl.AMP(torch.float16)},
    },
    4: {
        "replicas": {"replicas": 2},
        "tensor and meta": {
            "tensor_parallel": 2, "plan": {"up": "colwise", "down": "rowwise"}, "init": "meta",
        },
    },
}  # fmt: skip


def find_on_all(num_processes):
    found = {}
    for number, (name, options) in enumerate(ENGINES[num_processes].items()):
        arguments = {"in_backward": number % 2 == 0, "gradient_clip": 1.0}
        searched = find(fsdp(num_processes, **options), **arguments)
        found[name] = searched, find(fsdp(num_processes, **options), searches=False, **arguments)
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("num_processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_smallest_of_all_limits_is_found_and_nothing_changes(num_processes):
    """One rank runs out of memory in the middle of a pass, and no other waits for it. Training then takes the steps
    that it takes without a search: weights, moments, buffers and dropout are equal bit for bit.
    """
    found = together(lambda: find_on_all(num_processes), num_processes=num_processes)

    assert len(found) == len(ENGINES[num_processes])
    for key, ((size, tried, state), (_, _, expected)) in found.items():
        assert size == min(LIMITS[:num_processes]), key
        assert tried == {each: each <= size for each in tried}, key
        assert len(expected[1]["state"]) == 8
        torch.testing.assert_close(state, expected, rtol=0, atol=0)


class Finite(nn.Module):
    """A layer that raises for values that are not finite."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def forward(self, features):
        """Map (N, features) to (N, classes)."""
        logits = self.linear(features)
        assert logits.isfinite().all()
        return logits


def test_trial_steps_compute_finite_numbers():
    """Each process receives copies of its own values instead of others', not uninitialised memory."""
    size, tried, _ = together(lambda: find(fsdp(2), model=Finite()))

    assert size == 100
    assert all(tried.values())


def test_a_module_that_waits_for_other_processes_in_a_step_is_refused():
    """SyncBatchNorm communicates in its forward pass, whatever the mesh of the weights."""
    with pytest.raises(ValueError, match=r"would hang .* in SyncBatchNorm: find the size without sync_bn"):
        find(fsdp(2), model=nn.Sequential(nn.Linear(NUM_FEATURES, NUM_CLASSES), nn.SyncBatchNorm(NUM_CLASSES)))


def test_memory_is_free_while_other_steps_are_made():
    """On a GPU, the shards and the optimizer's state wait in host memory, and are back in the same place."""
    tensor = torch.arange(6.0).view(2, 3)
    part = tensor[1:]

    with offloaded([tensor.untyped_storage()]):
        size_bytes = tensor.untyped_storage().nbytes()

    assert size_bytes == 0
    assert tensor.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert part.tolist() == [[3, 4, 5]]
