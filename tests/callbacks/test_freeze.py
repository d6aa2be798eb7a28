"""Only the chosen parameters are frozen, by epoch, on any number of processes, and in a resumed run."""

import copy

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, quiet, weights

NUM_EPOCHS = 4


def adamw(model):
    """Return an optimizer that updates every parameter with a gradient, even if it is zero."""
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)


def train(callback, *, model=None, num_epochs=NUM_EPOCHS, batch_size=4, callbacks=(), **kwargs):
    model = model or mlp()
    return dl.SupervisedRunner().train(
        **{
            "model": model,
            "criterion": nn.CrossEntropyLoss(),
            "optimizer": adamw(model),
            "loaders": {"train": loader(16, batch_size)},
            "callbacks": {"freeze": callback, **{str(place): each for place, each in enumerate(callbacks)}},
            "num_epochs": num_epochs,
            "engine": dl.CPUEngine(),
            **quiet(),
            **kwargs,
        }
    )


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

    runner = train(dl.FreezeCallback(**arguments))

    assert torch.equal(weights(runner.model), weights(expected))
    assert all(each.requires_grad for each in runner.model.parameters())


@pytest.mark.parametrize("step", [7, 9, 11])
def test_a_resumed_run_is_the_whole_one(tmp_path, step):
    """The run is interrupted in the second epoch, which is frozen, at its end, or in the third."""
    whole = train(dl.FreezeCallback("0", until_epoch=2))
    checkpoint = dl.CheckpointCallback(tmp_path, mode="runner", every_steps=2)
    callbacks = [checkpoint, Interrupt(step, "on_batch_start")]

    with pytest.raises(KeyboardInterrupt):
        train(dl.FreezeCallback("0", until_epoch=2), logdir=tmp_path, callbacks=callbacks)
    resumed = train(
        dl.FreezeCallback("0", until_epoch=2),
        callbacks=[dl.CheckpointCallback(tmp_path, mode="runner")],
        logdir=tmp_path,
        resume="auto",
    )

    assert torch.equal(weights(resumed.model), weights(whole.model))


def test_two_processes_freeze_alike():
    """Freezing under DDP works with find_unused_parameters=True."""
    engine = dl.DistributedDataParallelEngine(2, device="cpu", find_unused_parameters=True)

    together = train(dl.FreezeCallback("0", until_epoch=2), engine=engine, batch_size=2)

    expected = by_hand(mlp(), frozen="0.", epochs={1, 2})
    torch.testing.assert_close(weights(together.model), weights(expected), rtol=0, atol=1e-5)


def test_ddp_without_the_search_for_unused_parameters_is_refused():
    """The error, raised before training, says which argument to pass."""
    engine = dl.DistributedDataParallelEngine(1, device="cpu")

    with pytest.raises(ValueError, match=r"DistributedDataParallelEngine\(find_unused_parameters=True\)"):
        train(dl.FreezeCallback("0"), engine=engine)


def test_a_frozen_batch_norm_keeps_its_statistics():
    """A frozen batch norm normalizes by its statistics; one that is still partly trained updates them."""
    model = mlp(batch_norm=True)
    before = copy.deepcopy(model[1].state_dict())

    frozen = train(dl.FreezeCallback(["0", "1"]), model=copy.deepcopy(model), valid_every_steps=2, loaders={
        "train": loader(16, 4), "valid": loader(8, 4),
    })  # fmt: skip
    half = train(dl.FreezeCallback(["1.weight"]), model=copy.deepcopy(model))

    assert all(torch.equal(value, before[name]) for name, value in frozen.model[1].state_dict().items())
    assert not torch.equal(half.model[1].running_mean, before["running_mean"])
    assert torch.equal(half.model[1].weight, before["weight"])


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (
            {"patterns": "encoder"},
            ValueError,
            r"no trainable parameter matches 'encoder'; .* 0.weight, 0.bias, 3.weight, 3.b",
        ),
        ({"patterns": ["0", "3"]}, ValueError, r"would freeze all parameters of the model, by \['0', '3'\]"),
        ({"patterns": "0", "model_key": "teacher"}, KeyError, "needs model 'teacher'; the runner has"),
        ({"patterns": "0", "from_epoch": 0}, ValueError, "from_epoch must be >= 1, got 0"),
        ({"patterns": "0", "from_epoch": 3, "until_epoch": 2}, ValueError, "got from_epoch=3, until_epoch=2"),
    ],
)
def test_bad_input_is_refused(arguments, error, words):
    """The error names the argument or parameter, and is raised before training."""
    with pytest.raises(error, match=words):
        train(dl.FreezeCallback(**arguments))
