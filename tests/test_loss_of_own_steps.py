"""A loss that becomes NaN ends a run, also one whose `handle_batch` steps."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import loader, train


class ByHand(dl.Runner):
    """Runner that steps itself and whose metric is NaN from a step on; `breaks` lets the weights become NaN, too."""

    def __init__(self, key="loss", *, breaks=True, steps=True):
        super().__init__()
        self.key, self.breaks, self.steps = key, breaks, steps

    def handle_batch(self, batch):
        features, targets = batch
        loss = nn.functional.cross_entropy(self.model(features), targets)
        metric = loss * (float("nan") if self.batch_step >= 3 else 1.0)
        if self.is_train_loader:
            if self.steps:
                self.engine.zero_grad(self.optimizer)
            self.engine.backward(metric if self.breaks else loss)
            if self.steps:
                self.engine.step(self.optimizer)
        self.batch_metrics[self.key] = metric.detach()


def trained(runner):
    callbacks = [] if runner.steps else [dl.OptimizerCallback("loss")]
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    return train(runner=runner, criterion=None, loaders=loaders, callbacks=callbacks, num_epochs=3)


@pytest.mark.parametrize(("key", "steps"), [("loss", True), ("g_loss", True), ("loss", False)])
def test_a_loss_that_becomes_nan_ends_a_run_that_steps_or_backpropagates_itself(key, steps):
    """The error comes at the end of the training loader, as from BackwardCallback; any key if weights became NaN.

    With an OptimizerCallback and without a BackwardCallback, the loss is that of the former.
    """
    with pytest.raises(ValueError, match=f"{key!r} became nan within epoch 1 of loader 'train'"):
        trained(ByHand(key, steps=steps))


def test_another_metric_may_be_nan():
    """A metric without a value in some batches does not end the run, as long as the weights are finite."""
    runner = trained(ByHand("share_of_pairs", breaks=False))

    assert runner.epoch_step == 3 and runner.epoch_metrics["train"]["share_of_pairs"] != 0.0
    assert all(torch.isfinite(each).all() for each in runner.model.parameters())
