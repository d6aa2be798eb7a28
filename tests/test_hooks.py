"""Tests of the signatures that a runner's hooks may have."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.loop.hooks import call_hook
from tests.tiny import loader, train

DATA = TensorDataset(torch.randn(12, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(12, 1))


class WithStage(dl.IRunner):
    """Hooks as runnerkit declares them."""

    def get_stage_len(self, stage):
        return 2

    def get_loaders(self, stage):
        return {"train": DataLoader(DATA, batch_size=4), "valid": DataLoader(DATA, batch_size=4)}

    def get_model(self, stage):
        return nn.Linear(3, 1)

    def get_criterion(self, stage):
        return nn.MSELoss()

    def get_optimizer(self, stage, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def get_scheduler(self, stage, optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def get_callbacks(self, stage):
        return {
            "criterion": dl.CriterionCallback("logits", "targets", "loss"),
            "backward": dl.BackwardCallback("loss"),
            "optimizer": dl.OptimizerCallback("loss"),
            "scheduler": dl.SchedulerCallback(),
        }

    def handle_batch(self, batch):
        features, targets = batch
        self.batch = {"logits": self.model(features), "targets": targets}


class WithoutStage(WithStage):
    """Hooks and ``num_epochs`` of Catalyst 22.04."""

    get_stage_len = dl.IRunner.get_stage_len

    @property
    def num_epochs(self):
        return 2

    def get_loaders(self):
        return super().get_loaders("")

    def get_model(self):
        return super().get_model("")

    def get_criterion(self):
        return super().get_criterion("")

    def get_optimizer(self, model):
        return super().get_optimizer("", model)

    def get_scheduler(self, optimizer):
        return super().get_scheduler("", optimizer)

    def get_callbacks(self):
        return super().get_callbacks("")


class StageLast(WithStage):
    """Hooks with the stage last, under other names, or as a keyword."""

    def get_loaders(self, *, stage):
        return super().get_loaders(stage)

    def get_model(self, key="unused"):
        return super().get_model(key)

    def get_optimizer(self, model, stage):
        assert stage == "train"
        return super().get_optimizer(stage, model)

    def get_scheduler(self, adam, stage):
        assert stage == "train"
        return super().get_scheduler(stage, adam)

    def get_callbacks(self, *args):
        assert args == ("train",)
        return super().get_callbacks(*args)


@pytest.mark.parametrize("declared", [WithoutStage, StageLast])
def test_hooks_may_leave_the_stage_out_or_take_it_last(declared):
    """Epochs, learning rates and weights are those of the same hooks that take (stage, ...)."""
    reference, runner = (each(engine=dl.CPUEngine()).run() for each in (WithStage, declared))

    assert runner.epoch_step == reference.epoch_step == 2
    assert runner.experiment_metrics == reference.experiment_metrics
    torch.testing.assert_close(runner.model.state_dict(), reference.model.state_dict(), rtol=0, atol=0)


def test_evaluation_and_loading_call_hooks_without_stage(tmp_path):
    """`evaluate_loader` and `load` make the model and the callbacks by the same hooks."""

    class Runner(dl.Runner):
        def get_model(self):
            return nn.Linear(3, 1)

        def get_criterion(self):
            return nn.MSELoss()

        def get_callbacks(self):
            return {"criterion": dl.CriterionCallback("logits", "targets", "loss")}

        def predict_batch(self, batch):
            return self.model(batch[0])

        handle_batch = WithStage.handle_batch

    torch.save(nn.Linear(3, 1).state_dict(), tmp_path / "weights.pth")
    batches = DataLoader(DATA, batch_size=4)

    assert list(Runner().evaluate_loader(batches, engine=dl.CPUEngine())) == ["loss"]
    assert len(list(Runner().predict_loader(loader=batches, cpu=True))) == 3
    assert isinstance(Runner().load(tmp_path / "weights.pth").model, nn.Linear)


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

    class Runner(WithStage):
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

    class Assigned(WithStage):
        get_stage_len = dl.IRunner.get_stage_len

        def __init__(self):
            self.num_epochs = 4
            super().__init__(engine=dl.CPUEngine())

    assert Assigned().run().epoch_step == 4
