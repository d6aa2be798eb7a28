"""A scheduler that nothing steps, that two step, or that is passed in another form raises and says what to write."""

from functools import partial

import pytest

from runnerkit import dl
from tests.interrupt import at
from tests.schedules import NUM_EPOCHS, Own, Steps, TimmLike, by_callbacks, halve, rates_by_hand, rates_of_run
from tests.tiny import train


def stepped_by(callbacks):
    return {"callbacks": callbacks}


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"runner": Steps()}, ValueError, "nothing steps the scheduler.*scheduler_interval='step'.*'manual'"),
        ({"scheduler_interval": "batch"}, ValueError, "scheduler_interval must be 'step'.*'epoch'.*'manual'.*'batch'"),
        (
            {"scheduler_interval": "step", **stepped_by([dl.SchedulerCallback(mode="epoch")])},
            ValueError, "scheduler_interval='step' and SchedulerCallback.mode='epoch'. contradict",
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


def test_hooks_have_to_add_a_callback():
    """The library cannot add one to hooks that are overridden."""

    class Hooks(Own):
        def get_callbacks(self, stage):
            return {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}

    for options in ({}, {"scheduler_interval": "step"}):
        with pytest.raises(ValueError, match=r"add SchedulerCallback"):
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
            r"scheduler_interval='epoch'.*SchedulerCallback\(loader_key='valid', metric_key='loss'\).*frequency=2",
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
