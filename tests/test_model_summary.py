"""Tests of utils.summarize: its numbers equal torch's, and it leaves the model unchanged."""

import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from runnerkit import utils
from runnerkit.seeding.generators import CPUState
from tests.tiny import mlp, weights


class Mixed(nn.Module):
    """Model with shared, frozen and nested modules, several inputs and outputs, and draws from all generators."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1), nn.BatchNorm2d(8), nn.ReLU())
        self.embedding = nn.Embedding(10, 8)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.norm = nn.LayerNorm(8).requires_grad_(False)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.mask = torch.ones(8)  # neither parameter nor buffer
        self.num_calls = 0

    def forward(self, images, *, words):
        self.num_calls += 1
        rows = self.stem(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([rows, self.embedding(words)], dim=1)
        position = torch.arange(tokens.shape[1])  # on the default device
        tokens = tokens + position[:, None] + random.random() + np.random.random()
        hidden, state = self.lstm(tokens * self.mask)
        attended, _ = self.attention(hidden, hidden, hidden)
        return {"logits": self.head(self.dropout(self.norm(attended))), "state": state}


BATCH = {"images": torch.zeros(2, 3, 8, 8), "words": torch.zeros(2, 5, dtype=torch.int64)}


def seen_by_hooks(model, batch):
    """Return the output shapes of a real forward pass by module name."""
    shapes = {}

    def note(name):
        def hook(module, inputs, output):
            if isinstance(output, torch.Tensor):
                shapes[name] = tuple(output.shape)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    model(**batch)
    return shapes


def test_parameters_are_torchs_own_sums():
    """Shared parameters count once, and frozen ones are not trainable."""
    model = Mixed()

    summary = utils.summarize(model)

    assert summary.num_parameters == sum(each.numel() for each in model.parameters())
    assert summary.num_trainable == sum(each.numel() for each in model.parameters() if each.requires_grad)
    assert summary.num_trainable == summary.num_parameters - 16
    by_name = dict(model.named_modules())
    for layer in summary.layers:
        assert layer.num_parameters == sum(each.numel() for each in by_name[layer.name].parameters()), layer.name
        assert layer.kind == type(by_name[layer.name]).__name__
    assert summary.num_flops is None and summary.problem == ""


@pytest.mark.parametrize("training", [True, False])
def test_shapes_are_those_of_a_real_pass(training):
    """Traced output shapes equal those of a real forward pass, with nested outputs kept nested."""
    model = Mixed().train(training)

    summary = utils.summarize(model, BATCH)

    assert summary.problem == ""
    shapes = {layer.name: layer.output_shape for layer in summary.layers}
    real = seen_by_hooks(copy.deepcopy(model), BATCH)
    assert {"stem.0", "embedding", "norm", "head"} <= real.keys()
    assert {name: shapes[name] for name in real} == real
    assert shapes["lstm"] == [(2, 21, 8), [(1, 2, 8), (1, 2, 8)]]
    assert shapes[""] == {"logits": (2, 21, 10), "state": [(1, 2, 8), (1, 2, 8)]}


def test_flops_are_those_computed_by_hand():
    """Each weight costs two FLOPs per output, a multiplication and an addition; other operations count as zero."""
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 10 * 12, 7))

    summary = utils.summarize(model, torch.zeros(5, 4, 10, 12))

    conv = 2 * 5 * (6 * 10 * 12) * (4 // 2) * 3 * 3
    linear = 2 * 5 * (6 * 10 * 12) * 7
    assert {layer.name: layer.num_flops for layer in summary.layers} == {
        "": conv + linear, "0": conv, "1": 0, "2": 0, "3": linear,
    }  # fmt: skip
    assert summary.num_flops == conv + linear


def test_module_that_is_called_twice_costs_twice():
    """The FLOPs of all calls of a module are added; its shape is that of the last call."""

    class Twice(nn.Sequential):
        def forward(self, x):
            return self[0](self[0](x)[:2])

    summary = utils.summarize(Twice(nn.Linear(4, 4, bias=False)), torch.zeros(3, 4))

    [_, layer] = summary.layers
    assert layer.num_flops == 2 * (3 + 2) * 4 * 4 == summary.num_flops
    assert layer.output_shape == (2, 4)
    assert summary.num_parameters == 16


@pytest.mark.parametrize("training", [True, False])
def test_nothing_of_the_model_is_disturbed(training, monkeypatch):
    """Weights, statistics, modes, hooks, gradients and generators do not change, and no tensor is copied."""
    model = Mixed().train(training)
    model.norm.train(not training)
    called = []
    model.stem.register_forward_hook(lambda *_: called.append(1))
    before, modes = weights(model), [each.training for each in model.modules()]
    parameters, generators = list(model.parameters()), CPUState()
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", None)

    assert utils.summarize(model, BATCH).problem == ""

    assert torch.equal(weights(model), before)
    assert [each.training for each in model.modules()] == modes
    assert model.num_calls == 0 and called == []
    assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
    assert all(each.grad is None and each.device.type == "cpu" for each in parameters)
    assert len(model.stem._forward_hooks) == 1
    assert generators.moved() == set()


class Looks(nn.Module):
    """Model whose forward pass depends on values after its first layer."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x):
        x = self.first(x)
        return self.second(x) if x.sum().item() > 0 else x


def test_model_that_cannot_be_traced_has_parameters_and_what_came_before():
    """If tracing fails, the summary has parameters, the shapes so far and the reason, and no error is raised."""
    summary = utils.summarize(Looks(), torch.zeros(1, 4))

    assert summary.num_parameters == 23
    assert summary.num_flops is None
    assert [layer.output_shape for layer in summary.layers] == [None, (1, 3), None]
    assert "Tensor.item() cannot be called on meta tensors" in summary.problem
    assert str(summary).splitlines()[-1] == f"shapes and FLOPs are incomplete, tracing failed: {summary.problem}"


def test_forward_that_was_replaced_is_not_run():
    """A replaced forward method is not called, because it may run the real model and change its statistics."""
    model = nn.Sequential(nn.BatchNorm1d(4))
    inner = model[0].forward
    model[0].forward = lambda x: inner(x)

    summary = utils.summarize(model, torch.zeros(3, 4))

    assert summary.problem == "TypeError: forward of this BatchNorm1d was replaced and may run the original model"
    assert model[0].num_batches_tracked == 0
    assert summary.num_parameters == 8


def test_table_shows_as_many_levels_as_asked():
    """The table has a line per module up to `depth`, or for a lone layer, and the sums; lazy layers count as 0."""
    model = nn.Sequential(mlp(), nn.Identity())

    shallow = str(utils.summarize(model, torch.zeros(32, 6), depth=1)).splitlines()
    deep = str(utils.summarize(model, torch.zeros(32, 6))).splitlines()

    assert shallow == [
        "layer  type        output shape  parameters  FLOPs",
        "0      Sequential  (32, 3)              163  9.22k",
        "1      Identity    (32, 3)                0   0.00",
        "163 parameters, 163 of them trainable",
        "9.22k FLOPs in the forward pass of one batch",
    ]
    assert [line.split()[0] for line in deep[1:-2]] == ["0", "0.0", "0.1", "0.2", "0.3", "1"]
    assert str(utils.summarize(nn.Linear(4, 2))).splitlines()[1].split() == ["Linear", "-", "10", "-"]
    assert utils.summarize(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2))).num_parameters == 8


def test_what_is_no_model_is_refused():
    """Arguments of the wrong type or value raise errors with the expected and the given value."""
    with pytest.raises(TypeError, match=r"summarize expects a torch\.nn\.Module, got dict"):
        utils.summarize({})
    with pytest.raises(ValueError, match="depth must be >= 1, got 0; 1 shows the direct submodules"):
        utils.summarize(nn.Linear(1, 1), depth=0)
