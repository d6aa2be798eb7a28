"""Only the chosen parameters are frozen, by epoch, on any number of processes, and in a resumed run."""

import copy

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, train, weights

NUM_EPOCHS = 4


def adamw(model):
    """Return an optimizer that updates every parameter with a gradient, even if it is zero."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def run(*callbacks, model=None, batch_size=4, **options):
    model = model or mlp()
    defaults = {"loaders": {"train": loader(16, batch_size)}, "num_epochs": NUM_EPOCHS, "callbacks": list(callbacks)}
    return train(model, optimizer=adamw(model), **(defaults | options))


def by_hand(model, *, frozen, epochs):
    """Train with the chosen parameters frozen in the given epochs."""
    optimizer = adamw(model)
    for epoch in range(1, NUM_EPOCHS + 1):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not (name.startswith(frozen) and epoch in epochs))
        for features, targets in loader(16, 4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(features), targets).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize(
    ("arguments", "frozen", "epochs"),
    [
        ({"patterns": "0", "until_epoch": 2}, "0.", {1, 2}),
        ({"patterns": ["0.*"], "from_epoch": 3}, "0.", {3, 4}),
        ({"patterns": "3.bia?", "from_epoch": 2, "until_epoch": 3}, "3.bias", {2, 3}),
    ],
)
def test_weights_are_those_by_hand(arguments, frozen, epochs):
    """Weights equal the hand-written loop's bit for bit, although the optimizer has momentum and weight decay."""
    expected = by_hand(mlp(), frozen=frozen, epochs=epochs)

    runner = run(dl.FreezeCallback(**arguments))

    assert torch.equal(weights(runner.model), weights(expected))
    assert all(each.requires_grad for each in runner.model.parameters())


def test_two_processes_freeze_alike():
    """Freezing under DDP works with find_unused_parameters=True."""
    engine = dl.DistributedDataParallelEngine(2, device="cpu", find_unused_parameters=True)

    together = run(dl.FreezeCallback("0", until_epoch=2), engine=engine, batch_size=2)

    expected = by_hand(mlp(), frozen="0.", epochs={1, 2})
    torch.testing.assert_close(weights(together.model), weights(expected), rtol=0, atol=1e-5)


def test_a_frozen_batch_norm_keeps_its_statistics():
    """A frozen batch norm normalizes by its statistics; one that is still partly trained updates them."""
    model = mlp(batch_norm=True)
    before = copy.deepcopy(model[1].state_dict())

    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    frozen = run(dl.FreezeCallback(["0", "1"]), model=copy.deepcopy(model), valid_every_steps=2, loaders=loaders)
    half = run(dl.FreezeCallback(["1.weight"]), model=copy.deepcopy(model))

    assert all(torch.equal(value, before[name]) for name, value in frozen.model[1].state_dict().items())
    assert not torch.equal(half.model[1].running_mean, before["running_mean"])
    assert torch.equal(half.model[1].weight, before["weight"])
