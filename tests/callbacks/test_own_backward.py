"""Tests of an OptimizerCallback that backpropagates the loss itself."""

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.tiny import train

GENERATOR = torch.Generator().manual_seed(0)
DATA = TensorDataset(torch.randn(22, 3, generator=GENERATOR), torch.randn(22, 1, generator=GENERATOR))


class Manual(dl.Runner):
    """A loss in handle_batch; `backward` in it if asked."""

    goes_backward = False

    def handle_batch(self, batch):
        features, targets = batch
        loss = F.mse_loss(self.model(features), targets)
        self.batch_metrics["loss"] = loss
        if self.is_train_loader and self.goes_backward:
            self.engine.backward(loss)


def weights_after(runner, callbacks, **options):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    loaders = {key: DataLoader(DATA, batch_size=4) for key in ("train", "valid")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, runner=runner, optimizer=optimizer, loaders=loaders, callbacks=callbacks, num_epochs=2, **options)
    return runner.model.weight.detach().clone()


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("options", [{}, {"amp": True}, {"num_processes": 2}])
def test_the_weights_are_those_of_a_backward_callback(accumulation, options):
    """Accumulated, in mixed precision, and in two processes."""
    stepper = dl.OptimizerCallback("loss", accumulation_steps=accumulation)
    expected = weights_after(Manual(), [dl.BackwardCallback("loss"), stepper], **options)

    actual = weights_after(Manual(), [dl.OptimizerCallback("loss", accumulation_steps=accumulation)], **options)

    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_it_is_said_once_and_a_backward_pass_of_the_user_is_not_repeated(caplog):
    """One warning in a run of two epochs; none, and the same weights, if handle_batch goes backward."""
    with caplog.at_level(logging.WARNING):
        own = weights_after(Manual(), [dl.OptimizerCallback("loss")])
    [warning] = caplog.records
    assert warning.getMessage().startswith("OptimizerCallback backpropagates 'loss' itself")
    caplog.clear()
    by_hand = Manual()
    by_hand.goes_backward = True
    assert torch.equal(weights_after(by_hand, [dl.OptimizerCallback("loss")]), own)
    assert not caplog.records


def test_two_losses_are_backpropagated_before_any_step():
    """Both gradients are those of the weights before the step, as with two BackwardCallbacks."""

    class TwoLosses(dl.Runner):
        def handle_batch(self, batch):
            one, two = self.model["one"], self.model["two"]
            self.batch_metrics["first"] = one(batch[0]).square().mean()
            self.batch_metrics["second"] = F.mse_loss(two(one(batch[0])), batch[1])

    def weights_with(*extra):
        torch.manual_seed(0)
        models = {"one": nn.Linear(3, 3), "two": nn.Linear(3, 1)}
        steps = [dl.OptimizerCallback(loss, optimizer_key=key) for loss, key in (("first", "one"), ("second", "two"))]
        optimizer = {key: torch.optim.SGD(each.parameters(), lr=0.1) for key, each in models.items()}
        loaders, callbacks = {"train": DataLoader(DATA, batch_size=4)}, [*steps, *extra]
        runner = train(models, runner=TwoLosses(), optimizer=optimizer, loaders=loaders, callbacks=callbacks)
        return torch.cat([each.flatten() for model in runner.model.values() for each in model.parameters()])

    expected = weights_with(dl.BackwardCallback("first"), dl.BackwardCallback("second"))
    torch.testing.assert_close(weights_with(), expected, rtol=0, atol=0)


def test_a_loss_without_graph_is_explained():
    """No gradients and no loss to backpropagate: the error says what to add."""

    class Detached(Manual):
        def handle_batch(self, batch):
            super().handle_batch(batch)
            self.batch_metrics["loss"] = self.batch_metrics["loss"].detach()

    with pytest.raises(RuntimeError, match=r"no parameter of the optimizer has a gradient: add BackwardCallback"):
        weights_after(Detached(), [dl.OptimizerCallback("loss")])
    with pytest.raises(RuntimeError, match=r"lack 'los', they have \['loss'\]; did you mean 'loss'\?"):
        weights_after(Manual(), [dl.OptimizerCallback("los")])
