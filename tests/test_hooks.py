"""Tests of the signatures that a runner's hooks may have."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR

from runnerkit import dl
from runnerkit.loop.hooks import call_hook
from tests.tiny import loader, mlp, sgd, train, weights


def criterion():
    return {"criterion": dl.CriterionCallback("logits", "targets", "loss")}


class WithoutStage(dl.IRunner):
    """Hooks and ``num_epochs`` of Catalyst 22.04."""

    num_epochs = property(lambda self: 2)

    def get_loaders(self):
        return {"train": loader(12, 4), "valid": loader(8, 4)}

    def get_model(self):
        return mlp()

    def get_criterion(self):
        return nn.CrossEntropyLoss()

    def get_optimizer(self, model):
        return sgd(model)

    def get_scheduler(self, optimizer):
        return ExponentialLR(optimizer, 0.5)

    def get_callbacks(self):
        steps = {"backward": dl.BackwardCallback("loss"), "optimizer": dl.OptimizerCallback("loss")}
        return {**criterion(), **steps, "scheduler": dl.SchedulerCallback()}

    def handle_batch(self, batch):
        features, targets = batch
        self.batch = {"logits": self.model(features), "targets": targets}


def test_hooks_may_leave_the_stage_out():
    """Epochs, learning rates and weights are those of a runner that is passed the components."""
    model = mlp()
    optimizer, loaders = sgd(model), WithoutStage().get_loaders()
    made = {"optimizer": optimizer, "scheduler": ExponentialLR(optimizer, 0.5), "loaders": loaders}
    reference = train(model, num_epochs=2, **made)

    runner = WithoutStage(engine=dl.CPUEngine()).run()

    assert runner.epoch_step == reference.epoch_step == 2
    assert runner.experiment_metrics == reference.experiment_metrics
    assert torch.equal(weights(runner.model), weights(model))


def test_evaluation_and_loading_call_hooks_without_stage(tmp_path):
    """`evaluate_loader` and `load` make the model and the callbacks by the same hooks."""

    class Runner(dl.Runner):
        get_model, get_criterion = WithoutStage.get_model, WithoutStage.get_criterion
        handle_batch = WithoutStage.handle_batch

        def get_callbacks(self):
            return criterion()

        def predict_batch(self, batch):
            return self.model(batch[0])

    torch.save(mlp(seed=3).state_dict(), tmp_path / "weights.pth")

    assert list(Runner().evaluate_loader(loader(12, 4), engine=dl.CPUEngine())) == ["loss"]
    assert len(list(Runner().predict_loader(loader=loader(12, 4), cpu=True))) == 3
    assert torch.equal(weights(Runner().load(tmp_path / "weights.pth").model), weights(mlp(seed=3)))


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        (lambda stage, model: (stage, model), ("train", "m")),
        (lambda model, stage: (stage, model), ("train", "m")),
        (lambda stage, net: (stage, net), ("train", "m")),
        (lambda net, stage: (stage, net), ("train", "m")),
        (lambda a, b: (a, b), ("train", "m")),
        (lambda net: net, "m"),
        (lambda stage: stage, "train"),
        (lambda: None, None),
        (lambda net, lr=0.1: (net, lr), ("m", 0.1)),
        (lambda *args: args, ("train", "m")),
        (lambda **given: given, {"stage": "train", "model": "m"}),
        (lambda model, **given: (model, given), ("m", {"stage": "train"})),
        (lambda net, **given: (net, given), ("m", {})),
    ],
)
def test_arguments_go_to_the_parameters_of_their_names(hook, expected):
    """Other names get what is left, and a hook with one parameter does without the stage."""
    assert call_hook(hook, stage="train", model="m") == expected


def test_a_hook_with_too_many_parameters_is_refused_with_its_signature():
    """The error names the hook, what it declares and what it gets."""

    class Runner(WithoutStage):
        def get_optimizer(self, stage, model, lr):
            raise AssertionError

    with pytest.raises(TypeError, match=r"get_optimizer\(stage, model, lr\): this hook gets stage and model, and may"):
        Runner(engine=dl.CPUEngine()).run()


def test_num_epochs_of_train_and_of_a_subclass():
    """`train(num_epochs=)` can be read as `runner.num_epochs`; a property of a `Runner` decides, as in Catalyst."""

    class Fixed(dl.SupervisedRunner):
        num_epochs = property(lambda self: 2)

    def epochs_of(runner, **length):
        train(runner=runner, optimizer=None, loaders={"valid": loader(8, 4)}, **length)
        return runner.epoch_step, runner.num_epochs

    assert epochs_of(dl.SupervisedRunner(), num_epochs=3) == (3, 3)
    assert epochs_of(dl.SupervisedRunner()) == (1, 1)
    assert epochs_of(Fixed()) == (2, 2)

    class Assigned(WithoutStage):
        num_epochs = 0

        def __init__(self):
            self.num_epochs = 4
            super().__init__(engine=dl.CPUEngine())

    assert Assigned().run().epoch_step == 4


@pytest.mark.parametrize(
    ("hook", "returned", "error", "words"),
    [
        ("get_loaders", {}, ValueError, "loaders is empty"),
        ("get_model", {}, TypeError, r"get_model returned \{\}"),
        ("get_model", [mlp()], TypeError, "model is a list"),
        ("get_optimizer", {}, KeyError, "OptimizerCallback needs an optimizer.*get_optimizer"),
        ("get_callbacks", None, TypeError, "get_callbacks must return a dict.*NoneType"),
        ("get_callbacks", [dl.BackwardCallback("loss")], TypeError, "get_callbacks must return a dict.*list"),
        ("get_loggers", None, TypeError, "loggers must be a dict.*NoneType"),
        ("get_stage_len", {}, TypeError, r"num_epochs must be an integer.*\{\}"),
        ("get_engine", {}, TypeError, r"engine=\{\} is not an engine"),
    ],
)
def test_a_hook_that_returns_nothing_of_use_is_named(hook, returned, error, words):
    """Instead of an error in the user's next hook, or a run that does nothing."""
    attributes = {hook: lambda self, *given, **named: returned}
    if hook == "get_optimizer":
        attributes["get_scheduler"] = lambda self: None
    with pytest.raises(error, match=words):
        type("Made", (WithoutStage,), attributes)(engine=dl.CPUEngine()).run()


@pytest.mark.parametrize("hook", ["get_criterion", "get_scheduler", "get_loggers"])
def test_a_hook_may_return_an_empty_dict(hook):
    """It is as if there were none."""

    class Made(WithoutStage):
        def get_callbacks(self):
            return {key: each for key, each in super().get_callbacks().items() if key in ("backward", "optimizer")}

        def get_scheduler(self):
            return None

        def handle_batch(self, batch):
            self.batch_metrics["loss"] = nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    found = type("Empty", (Made,), {hook: lambda self: {}})(engine=dl.CPUEngine()).run()
    assert torch.equal(weights(found.model), weights(Made(engine=dl.CPUEngine()).run().model))
