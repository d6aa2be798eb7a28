"""A class of runners that uses a name of the runner's own state is refused when it is made."""

import functools

import pytest
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, sgd


def method(self):
    return 1


@pytest.mark.parametrize("base", [dl.IRunner, dl.Runner, dl.SupervisedRunner])
@pytest.mark.parametrize("name", ["step", "batch", "num_steps", "engine", "loader", "global_batch_step", "current_run"])
@pytest.mark.parametrize("kind", [lambda each: each, property, functools.cached_property, staticmethod])
def test_a_method_of_the_name_of_an_attribute_is_refused(base, name, kind):
    """The runner would write over it, or read it: `def step` broke a run that has a logdir, after an epoch."""
    with pytest.raises(TypeError, match=rf"Own.{name} replaces the runner's own attribute '{name}': choose another"):
        type("Own", (base,), {name: kind(method)})


@pytest.mark.parametrize(("name", "value"), [("log_every", 5), ("criterion", nn.MSELoss()), ("loaders", {})])
def test_a_value_that_the_runner_would_replace_is_refused(name, value):
    """The constructor sets these attributes, so that the value of the class was ignored."""
    with pytest.raises(TypeError, match=f"set it as self.{name} in __init__"):
        type("Own", (dl.IRunner,), {name: value})


@pytest.mark.parametrize("name", ["seed", "hparams", "stages", "num_epochs", "_reset"])
def test_a_method_in_place_of_a_property_or_of_a_private_method_is_refused(name):
    words = "a method of the runner itself" if name[0] == "_" else "a property of the runner: decorate it with @prop"
    with pytest.raises(TypeError, match=f"Own.{name} replaces {words}"):
        type("Own", (dl.IRunner,), {name: method})


def test_an_instance_that_assigns_the_run_is_told_so():
    """A tracker's run of this name, or one of a method of the user, would break the loop much later."""
    runner = Legal(engine=dl.CPUEngine())

    with pytest.raises(AttributeError, match=r"Legal.current_run is the runner's own .* another name for the dict"):
        runner.current_run = {"id": 1}

    assert runner.run().current_run.stage is not None


def test_a_mixin_is_looked_at_too():
    """It comes before the runner, so that its methods apply."""

    class Steps:
        step = method

    with pytest.raises(TypeError, match=r"Own.step"):
        type("Own", (Steps, dl.Runner), {})
    type("Own", (dl.Runner, Steps), {})


class Legal(dl.IRunner):
    """Everything that a class may override."""

    model: nn.Sequential  # a narrower type
    seed = 3
    stages = ("train",)
    num_epochs = 2

    @property
    def hparams(self):
        return {"own": 1}

    def on_epoch_end(self, runner):
        super().on_epoch_end(runner)

    def get_loaders(self, stage):
        return {"train": loader(8, 4)}

    def get_model(self, stage):
        return mlp()

    def get_criterion(self, stage):
        return nn.CrossEntropyLoss()

    def get_optimizer(self, stage, model):
        return sgd(model)

    def get_callbacks(self, stage):
        return {"backward": dl.BackwardCallback(), "optimizer": dl.OptimizerCallback()}

    def log_text(self, tag, text):
        super().log_text(tag, text)

    def run(self):
        return super().run()

    def _repr_html_(self):
        return f"<p>{self.epoch_step}</p>"

    def handle_batch(self, batch):
        self.batch_metrics["loss"] = self.criterion(self.model(batch[0]), batch[1])


def test_hooks_events_and_properties_that_describe_a_run_are_legal():
    runner = Legal(engine=dl.CPUEngine()).run()

    assert (runner.seed, runner.epoch_step, runner.epoch_metrics["train"]["lr"]) == (3, 2, 0.1)
