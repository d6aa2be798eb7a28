"""The learning rate of several processes is scaled by the rule in every step, and only if requested."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, quiet, sgd, train_by_hand, weights

NUM_STEPS, BATCH_SIZE = 10, 8


def train_on_two(model, optimizer, **kwargs):
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        loaders={"train": loader(NUM_STEPS * 2 * BATCH_SIZE, BATCH_SIZE)},
        ddp=True,
        cpu=True,
        **quiet(),
        **kwargs,
    )


@pytest.mark.parametrize(("rule", "factor"), [("linear", 2.0), ("sqrt", 2.0**0.5), (None, 1.0)])
def test_two_processes_step_as_far_as_the_rule_says(rule, factor):
    """Two processes match one with the joined batch and the scaled rate to 1e-6 (float sums); that rate is logged."""
    mine, theirs = mlp(), mlp()

    runner = train_on_two(mine, sgd(mine, lr=0.05), lr_scale=rule)
    train_by_hand(theirs, sgd(theirs, lr=0.05 * factor), loader(NUM_STEPS * 2 * BATCH_SIZE, 2 * BATCH_SIZE))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert runner.epoch_metrics["train"]["lr"] == pytest.approx(0.05 * factor, rel=1e-12)


def test_two_scales_of_one_optimizer_are_refused():
    """Their factors would multiply in every step."""
    model = mlp()

    with pytest.raises(ValueError, match=r"two LRScaleCallbacks scale the same optimizer; pass either one"):
        dl.SupervisedRunner().train(
            model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={"train": loader(8, 4)},
            lr_scale="linear", callbacks=[dl.LRScaleCallback("linear", warmup_steps=2)], cpu=True, **quiet(),
        )  # fmt: skip


def test_the_same_callback_warms_up_again_in_the_next_run():
    """The warm-up count restarts with each stage."""
    callback = dl.LRScaleCallback("linear", warmup_steps=100)
    for _ in range(2):
        model = mlp()
        dl.SupervisedRunner().train(
            model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={"train": loader(8, 4)},
            callbacks=[callback], cpu=True, **quiet(),
        )  # fmt: skip

        assert callback.num_steps == {"": 2}


def test_warmup_goes_with_any_scheduler():
    """Each step's rate is the scheduler's times that step's factor; checkpoints contain the scheduler's rate."""
    mine, theirs, warmup = mlp(), mlp(), 4
    optimizer, reference = sgd(mine, lr=0.05), sgd(theirs, lr=0.05)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)

    runner = train_on_two(
        mine,
        optimizer,
        scheduler=scheduler,
        callbacks=[dl.LRScaleCallback("linear", warmup_steps=warmup), dl.SchedulerCallback(mode="batch")],
    )
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(reference, NUM_STEPS)
    for step, batch in enumerate(loader(NUM_STEPS * 2 * BATCH_SIZE, 2 * BATCH_SIZE)):
        (group,) = reference.param_groups
        unscaled, group["lr"] = group["lr"], group["lr"] * (1 + min(1, step / warmup))
        train_by_hand(theirs, reference, [batch])
        group["lr"] = unscaled
        schedule.step()

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert runner.optimizer.param_groups[0]["lr"] == pytest.approx(schedule.get_last_lr()[0], abs=1e-12)


def test_the_count_of_the_warmup_is_resumed(tmp_path):
    """An interrupted warm-up continues from its last step."""
    arguments = {
        "criterion": nn.CrossEntropyLoss(),
        "loaders": {"train": loader(40, BATCH_SIZE)},
        "cpu": True,
        **quiet(),
    }
    callbacks = [dl.LRScaleCallback("linear", warmup_steps=100) for _ in range(2)]

    for num_epochs, callback in zip((1, 2), callbacks, strict=True):
        model = mlp()
        dl.SupervisedRunner().train(
            model=model, optimizer=sgd(model), logdir=tmp_path / "logdir", resume="auto", num_epochs=num_epochs,
            callbacks=[callback], **arguments,
        )  # fmt: skip

    assert [callback.num_steps for callback in callbacks] == [{"": 5}, {"": 10}]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rule": "log"}, ValueError, "lr_scale must be 'linear' or 'sqrt', got 'log'"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps must be >= 0, got -1"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    """The error says what was expected."""
    with pytest.raises(error, match=message):
        dl.LRScaleCallback(**arguments)


def test_an_optimizer_that_is_not_there_is_named():
    """The error names the missing optimizer."""
    model = mlp()

    with pytest.raises(KeyError, match="needs optimizer 'generator'"):
        dl.SupervisedRunner().train(
            model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loaders={"train": loader(16, 8)},
            callbacks=[dl.LRScaleCallback(optimizer_key="generator")], cpu=True, **quiet(),
        )  # fmt: skip
