"""Tests of resume_options: a resumed run uses the optimizer and scheduler settings of the checkpoint or new ones."""

import math

import pytest
import torch
from torch.optim import lr_scheduler

from runnerkit import dl, read_metrics
from runnerkit.contrib import Lookahead
from tests.interrupt import at
from tests.tiny import loader, mlp, sgd, train, train_by_hand, weights

NUM_STEPS = 4  # per epoch


def cosine(optimizer, num_epochs=4):
    return lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)


def warm(after):
    return lambda optimizer: dl.WarmupLR(optimizer, num_steps=6, after=after(optimizer))


def in_turn(optimizer):
    parts = [lr_scheduler.ConstantLR(optimizer, 0.5, total_iters=1), lr_scheduler.StepLR(optimizer, 1)]
    return lr_scheduler.SequentialLR(optimizer, parts, milestones=[1])


def chained(optimizer):
    return lr_scheduler.ChainedScheduler(
        [lr_scheduler.StepLR(optimizer, 1, gamma=0.9), lr_scheduler.ExponentialLR(optimizer, 0.5)]
    )


def plateau(optimizer):
    return lr_scheduler.ReduceLROnPlateau(optimizer, threshold=10.0, patience=0)


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=4 * NUM_STEPS)


def fit(logdir, *, scheduler=None, lr=0.1, kind=torch.optim.SGD, **options):
    model = mlp()
    optimizer = kind(model.parameters(), lr=lr, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    options = {"optimizer": optimizer, "scheduler": scheduler and scheduler(optimizer), **options}
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    return train(model, loaders=loaders, logdir=logdir, resume="auto", **options)


def rates(logdir):
    table = read_metrics(logdir)
    return table[(table.loader == "train") & (table.metric == "lr")].value.tolist()


def test_a_schedule_that_is_passed_longer_is_rebuilt(tmp_path):
    """resume_options="arguments" follows a longer schedule from the resumed epoch on, one-cycle ones too."""
    fit(tmp_path / "cosine", num_epochs=2, scheduler=lambda optimizer: cosine(optimizer, 2))
    fit(tmp_path / "cycle", num_epochs=2, scheduler=lambda each: lr_scheduler.OneCycleLR(each, 0.1, 2 * NUM_STEPS))
    fit(tmp_path / "whole cycle", num_epochs=4, scheduler=one_cycle)

    fit(tmp_path / "cosine", num_epochs=4, scheduler=cosine, resume_options="arguments")
    fit(tmp_path / "cycle", num_epochs=4, scheduler=one_cycle, resume_options="arguments")

    longer = [0.05 * (1 + math.cos(math.pi * epoch / 4)) for epoch in range(4)]
    assert rates(tmp_path / "cosine") == pytest.approx([0.1, 0.05, *longer[2:]])
    assert rates(tmp_path / "cycle")[2:] == rates(tmp_path / "whole cycle")[2:]


def test_a_rate_that_is_passed_applies_with_the_momentum_that_was_saved(tmp_path):
    """A new learning rate applies with the saved momentum, as if set in the parameter group between two epochs."""
    fit(tmp_path, num_epochs=1)

    runner = fit(tmp_path, num_epochs=2, lr=0.01, resume_options="arguments")

    model = mlp()
    optimizer = sgd(model)
    for lr in (0.1, 0.01):
        optimizer.param_groups[0]["lr"] = lr
        train_by_hand(model, optimizer, loader(16, 4))
    assert rates(tmp_path) == pytest.approx([0.1, 0.01])
    assert weights(runner.model).equal(weights(model))


@pytest.mark.parametrize(
    "scheduler", [None, cosine, warm(cosine), warm(one_cycle), in_turn, chained, one_cycle, warm(in_turn)]
)
def test_the_same_arguments_give_the_run_that_was_never_interrupted(tmp_path, scheduler, caplog):
    """Both resume_options equal the uninterrupted run bit for bit if no argument changed, without a warning."""
    whole = fit(tmp_path / "whole", num_epochs=4, scheduler=scheduler)
    for source in ("checkpoint", "arguments"):
        fit(tmp_path / source, num_epochs=2, scheduler=scheduler)
        caplog.clear()  # half of the epochs end before their schedule
        resumed = fit(tmp_path / source, num_epochs=4, scheduler=scheduler, resume_options=source)

        assert caplog.messages == []
        assert weights(resumed.model).equal(weights(whole.model))
        assert rates(tmp_path / source) == rates(tmp_path / "whole")


def test_a_schedule_in_another_unit_goes_on_at_its_position_in_that_unit(tmp_path, caplog):
    """Stepped after each optimizer step instead of each epoch, it goes on after the steps that were taken, and says so.

    With the checkpoint's options, its schedule goes on as it was, in the new unit, and this is said too.
    """

    def of_steps(optimizer):
        return lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=3 * NUM_STEPS)

    for source in ("checkpoint", "arguments"):
        fit(tmp_path / source, num_epochs=1, scheduler=cosine, scheduler_interval="epoch")
        caplog.clear()
        fit(tmp_path / source, num_epochs=2, scheduler=of_steps, scheduler_interval="step", resume_options=source)
        assert "scheduler_interval was 'epoch', is 'step'" in caplog.text

    [_, last] = rates(tmp_path / "arguments")  # after both epochs, two thirds of the schedule
    assert last == pytest.approx(0.1 * (1 - 0.5 * 2 / 3))


@pytest.mark.parametrize("scheduler", [plateau, warm(plateau)])
def test_a_plateaus_count_is_the_checkpoints_and_the_rate_the_passed_one(tmp_path, scheduler):
    """ReduceLROnPlateau keeps the checkpoint's counts, because its metrics are unknown, and takes the new rate."""
    fit(tmp_path, num_epochs=2, scheduler=scheduler)

    runner = fit(tmp_path, num_epochs=3, scheduler=scheduler, lr=0.05, resume_options="arguments")

    after = getattr(runner.scheduler, "after", runner.scheduler)
    assert after.last_epoch >= 1
    assert rates(tmp_path)[2] == pytest.approx(0.05)


def test_the_warning_names_each_setting_once_with_what_applies(tmp_path, caplog):
    """The warning names each changed setting once and says which value applies."""
    fit(tmp_path, num_epochs=1, hparams={"lr": 0.1})

    fit(tmp_path, num_epochs=2, lr=0.01, hparams={"lr": 0.01})
    kept = caplog.text
    caplog.clear()
    fit(tmp_path, num_epochs=3, lr=0.02, hparams={"lr": 0.02}, resume_options="arguments")

    assert (
        "continues with the checkpoint's (resume_options='arguments' uses the ones that were passed): optimizer.lr is "
        "0.1, 0.01 was passed; and logging the new hyperparameters: hparams.lr was 0.1, is 0.01"
    ) in kept
    assert "continues with the new ones: optimizer.lr was 0.01, is 0.02; and logging the new hyperp" in caplog.text


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        ({"accumulation_steps": 2}, {"accumulation_steps": 4}, "accumulation_steps was 2, is 4"),
        ({}, {"gradient_clip": 0.5}, "gradient_clip was None, is 0.5"),
        ({"epoch_steps": 2}, {"epoch_steps": 3}, "epoch_steps was 2, is 3"),
    ],
)
def test_the_warning_names_what_a_step_is_made_of(tmp_path, caplog, before, after, changes):
    """Changed accumulation, clipping and steps of an epoch apply at once, and the warning says so."""
    fit(tmp_path, num_epochs=1, **before)

    fit(tmp_path, num_epochs=2, **after)

    assert f"the run continues with the new ones: {changes}" in caplog.text


def test_another_word_is_refused():
    """An unknown value of resume_options raises a ValueError."""
    with pytest.raises(ValueError, match=r"resume_options must be 'checkpoint' .* got 'new'"):
        train(resume_options="new")


class Counting(torch.optim.SGD):
    """An optimizer that keeps counters in its groups, as schedule-free optimizers do."""

    def __init__(self, params, lr=0.1):
        torch.optim.Optimizer.__init__(self, params, {"lr": lr, "k": 0, "weight_sum": 0.0})

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            group["weight_sum"] += group["lr"]
            for each in group["params"]:
                if each.grad is not None:
                    each.data.add_(each.grad, alpha=-group["lr"] / group["k"])


def test_counters_in_the_groups_are_the_checkpoints(tmp_path):
    """resume_options="arguments" takes options that the constructor accepts; the optimizer's own counters continue."""

    def run(num_epochs, name, lr=0.1):
        runner = fit(tmp_path / name, num_epochs=num_epochs, lr=lr, kind=Counting, resume_options="arguments")
        return weights(runner.model), runner.optimizer.param_groups[0]

    whole, _ = run(3, "whole")
    run(1, "parts")
    found, group = run(3, "parts")
    assert torch.equal(found, whole)
    assert group["k"] == 3 * NUM_STEPS
    run(1, "other")
    assert run(2, "other", 0.05)[1]["lr"] == 0.05


class Renamed(torch.optim.Optimizer):
    """An optimizer whose constructor has another word for the learning rate."""

    def __init__(self, params, learning_rate=0.1):
        super().__init__(params, {"lr": learning_rate})

    def step(self, closure=None):
        for each in self.param_groups[0]["params"]:
            each.data.add_(each.grad, alpha=-self.param_groups[0]["lr"])


def ahead(params, lr):
    return Lookahead(torch.optim.SGD(params, lr=lr, momentum=0.9), k=3)


def renamed(params, lr):
    return Renamed(params, lr)


class Derived(torch.optim.SGD):
    """An optimizer that adds an argument to those of another one, as Horovod's are made."""

    def __init__(self, params, named=None):
        super().__init__(params)


def derived(params, lr):
    return Derived([{"params": list(params), "lr": lr, "momentum": 0.9}])


@pytest.mark.parametrize("kind", [ahead, renamed, derived])
def test_the_rate_of_any_optimizer_is_the_passed_one_and_its_counters_are_the_checkpoints(tmp_path, kind):
    """Of a wrapper, and of a constructor with other words for its options."""

    def run(num_epochs, name, lr=0.1):
        runner = fit(tmp_path / name, num_epochs=num_epochs, lr=lr, kind=kind, resume_options="arguments")
        return weights(runner.model), runner.optimizer.param_groups[0]["lr"]

    whole, _ = run(2, "whole")
    run(1, "parts")
    assert torch.equal(run(2, "parts")[0], whole)
    run(1, "other")
    assert run(2, "other", 0.05)[1] == 0.05


@pytest.mark.parametrize("kind", [ahead, renamed])
def test_a_schedule_that_is_made_again_starts_from_the_passed_rate(kind):
    """It is made for the steps that an OptimizerCallback of the run accumulates."""

    class Own(dl.SupervisedRunner):
        def get_scheduler(self, stage, optimizer):
            return lr_scheduler.LinearLR(optimizer, 0.5, total_iters=100 * self.num_steps)

        def get_callbacks(self, stage):
            step = dl.OptimizerCallback("loss", accumulation_steps=2)
            return {**super().get_callbacks(stage), "_optimizer": step, "_": dl.SchedulerCallback(interval="epoch")}

    model, rates = mlp(), []
    note = at("on_epoch_start", lambda runner: rates.append(runner.optimizer.param_groups[0]["lr"]))
    train(model, runner=Own(), optimizer=kind(model.parameters(), lr=0.1), callbacks=[note])
    assert rates == [0.05]
