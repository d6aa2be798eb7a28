"""A scheduler that nothing steps, that two step, or that is passed in another form raises and says what to write."""

from functools import partial

import pytest
from torch import nn
from torch.optim import lr_scheduler

from runnerkit import dl
from tests.interrupt import at
from tests.schedules import (
    NUM_EPOCHS,
    PER_EPOCH,
    Own,
    Steps,
    TimmLike,
    by_callbacks,
    halve,
    rates_by_hand,
    rates_of_run,
)
from tests.tiny import mlp, sgd, train


def stepped_by(callbacks):
    return {"callbacks": callbacks}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        (
            {"runner": Steps()}, ValueError,
            "nothing steps the scheduler.*scheduler_interval='step'.*'manual'.*get_scheduler return None",
        ),
        ({"scheduler_interval": "batch"}, ValueError, "scheduler_interval must be 'step'.*'epoch'.*'manual'.*'batch'"),
        (
            {"scheduler_interval": "step", **stepped_by([dl.SchedulerCallback(interval="epoch")])},
            ValueError, "scheduler_interval='step' and SchedulerCallback.interval='epoch'. contradict",
        ),
        ({"scheduler_interval": "manual", **stepped_by([dl.SchedulerCallback()])}, ValueError, "remove one of the two"),
    ],
)  # fmt: skip
def test_who_steps_the_scheduler_has_to_be_clear(options, error, words):
    """One that nobody steps leaves the learning rate as it is; one that two step is twice as fast."""
    with pytest.raises(error, match=words):
        rates_of_run(halve, **options)


@pytest.mark.parametrize("options", [{}, {"scheduler_interval": "step"}, by_callbacks()])
def test_a_scheduler_that_is_stepped_twice_is_found(options):
    """A custom callback that steps it as well would halve the rate twice as often."""
    event = "on_batch_end" if "scheduler_interval" in options else "on_epoch_end"
    own = at(event, lambda runner: runner.scheduler.step())
    options = {**options, "callbacks": [*options.get("callbacks", ()), own]}

    with pytest.raises(ValueError, match=r"by the run, and by your code too.*scheduler_interval='manual'"):
        rates_of_run(halve, **options)

    unit = options.pop("scheduler_interval", "epoch")
    assert rates_of_run(halve, **options, scheduler_interval="manual") == rates_by_hand(halve, unit)


@pytest.mark.parametrize("others", [{"b": True}, {"b": True, "c": False}])
def test_your_code_may_step_those_that_no_callback_steps(others):
    """One scheduler has a callback, your code steps another one, and a third optimizer has none."""

    class Several(dl.Runner):
        scheduler_interval = "manual"

        def handle_batch(self, batch):
            features, targets = batch
            for key, model in self.model.items():
                self.batch_metrics[f"loss_{key}"] = nn.functional.cross_entropy(model(features), targets)

        def on_epoch_end(self, runner):
            for key in "bc":
                if self.scheduler.get(key) is not None:
                    self.scheduler[key].step()

    keys = ["a", *others]
    models = {key: mlp() for key in keys}
    optimizers = {key: sgd(model) for key, model in models.items()}
    schedulers = {
        key: lr_scheduler.ExponentialLR(each, 0.5) if others.get(key, True) else None
        for key, each in optimizers.items()
    }
    callbacks = [dl.BackwardCallback(f"loss_{key}") for key in keys]
    callbacks += [dl.OptimizerCallback(f"loss_{key}", key, key) for key in keys]
    options = {"runner": Several(), "optimizer": optimizers, "scheduler": schedulers, "criterion": None}

    train(models, callbacks=[*callbacks, dl.SchedulerCallback("a", interval="step")], **options)

    num_steps = {"a": PER_EPOCH, "b": 1, "c": 0}
    rates = {key: each.param_groups[0]["lr"] for key, each in optimizers.items()}
    assert rates == pytest.approx({key: 0.1 * 0.5 ** num_steps[key] for key in keys})


def test_hooks_have_to_add_a_callback():
    """The library cannot add one to hooks that are overridden."""

    class Hooks(Own):
        def get_callbacks(self, stage):
            return {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}

    for options in ({}, {"scheduler_interval": "step"}):
        with pytest.raises(ValueError, match=r"add SchedulerCallback.*'manual'.*get_scheduler return None"):
            rates_of_run(halve, runner=Hooks(), **options)


def test_a_scheduler_that_needs_the_epoch_is_not_stepped_per_step():
    with pytest.raises(ValueError, match=r"needs the number of the epoch.*step_update"):
        rates_of_run(partial(TimmLike, t_initial=NUM_EPOCHS), scheduler_interval="step")


@pytest.mark.parametrize(
    ("wrap", "words"),
    [
        (
            lambda each: {"scheduler": each, "interval": "step"},
            "Lightning's form.*scheduler=.*scheduler_interval='step'",
        ),
        (
            lambda each: {"scheduler": each, "monitor": "val_loss", "frequency": 2},
            r"scheduler_interval='epoch'.*SchedulerCallback\(monitor='valid/loss'\).*frequency=2",
        ),
        (lambda each: [each], "got a list of 1.*SequentialLR"),
        (lambda each: (each, each), "got a tuple of 2"),
        (lambda each: "cosine", "the string 'cosine'.*cosine_with_warmup"),
        (lambda each: {"": "StepLR"}, "the string 'StepLR'"),
        (lambda each: 0.1, r"a float without a method step\(\)"),
        (lambda each: type(each), "the class StepLR; pass an instance"),
    ],
)
def test_other_forms_are_explained(wrap, words):
    """Lightning's dict, names and lists raise before the run, also if a hook returns them."""

    class Made(dl.SupervisedRunner):
        def get_scheduler(self, stage, optimizer):
            return wrap(halve(optimizer))

    with pytest.raises(TypeError, match=words):
        rates_of_run(lambda optimizer: wrap(halve(optimizer)))
    with pytest.raises(TypeError, match=words):
        train(runner=Made())
