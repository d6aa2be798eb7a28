"""A loss that becomes NaN ends a run, also one whose `handle_batch` steps."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, mlp, quiet, sgd


class ByHand(dl.Runner):
    """Runner that steps itself and whose metrics are NaN from a step on; `breaks` lets the weights become NaN, too."""

    key, bad_step, breaks = "loss", 3, True

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model(features), targets)
        metric = loss * (float("nan") if self.batch_step >= self.bad_step else 1.0)
        if self.is_train_loader:
            self.engine.zero_grad(self.optimizer)
            self.engine.backward(metric if self.breaks else loss)
            self.engine.step(self.optimizer)
        self.batch_metrics[self.key] = metric.detach()


class BackwardByHand(ByHand):
    """Runner that backpropagates itself, and leaves the step to OptimizerCallback."""

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model(features), targets)
        loss = loss * (float("nan") if self.batch_step >= self.bad_step else 1.0)
        if self.is_train_loader:
            self.engine.backward(loss)
        self.batch_metrics["loss"] = loss.detach()


def train(runner, **options):
    for name, value in options.items():
        setattr(runner, name, value)
    callbacks = [dl.OptimizerCallback("loss")] if isinstance(runner, BackwardByHand) else []
    model = mlp()
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    return runner.train(
        model=model, optimizer=sgd(model), loaders=loaders, callbacks=callbacks, num_epochs=3, cpu=True, **quiet()
    )


@pytest.mark.parametrize("key", ["loss", "g_loss"])
def test_a_loss_that_becomes_nan_ends_a_run_that_steps_itself(key):
    """The error comes at the end of the training loader, as from BackwardCallback; any key if weights became NaN."""
    with pytest.raises(ValueError, match=f"{key!r} became nan within epoch 1 of loader 'train'"):
        train(ByHand(), key=key)


def test_so_does_the_loss_of_a_run_that_backpropagates_itself():
    """With an OptimizerCallback and without a BackwardCallback, the loss is that of the former."""
    with pytest.raises(ValueError, match="'loss' became nan within epoch 1 of loader 'train'"):
        train(BackwardByHand())


def test_another_metric_may_be_nan():
    """A metric without a value in some batches does not end the run, as long as the weights are finite."""
    runner = train(ByHand(), key="share_of_pairs", breaks=False)

    assert runner.epoch_step == 3 and runner.epoch_metrics["train"]["share_of_pairs"] != 0.0
    assert all(torch.isfinite(each).all() for each in runner.model.parameters())
