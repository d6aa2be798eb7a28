"""Tests that components replaced by a hook, and hooks set on an object, take effect at once."""

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from runnerkit import dl
from tests.interrupt import at
from tests.tiny import loader, mlp, sgd, train

LOADERS = {"train": loader(24, 4)}


def in_epoch(epoch, call):
    return at("on_epoch_start", lambda runner: call(runner) if runner.epoch_step == epoch else None)


@pytest.mark.parametrize("wrap", [lambda each: each, lambda each: dl.ControlFlowCallback(each, ignore_epochs=2)])
def test_a_hook_that_is_set_on_the_object_is_called(wrap):
    """A hook assigned to a callback or a runner is called even if its class does not override the method."""
    callback, runner, steps = dl.Callback(), dl.SupervisedRunner(), []
    callback.on_batch_end = lambda runner: steps.append(runner.batch_step)
    runner.on_epoch_end = lambda runner: steps.append("end")

    train(runner=runner, callbacks=[wrap(callback)], loaders=LOADERS)

    assert steps == [1, 2, 3, 4, 5, 6, "end"]


@pytest.mark.parametrize("clips", [dl.BackwardCallback, dl.OptimizerCallback])
def test_another_optimizers_gradients_are_clipped_too(clips):
    """A new optimizer for a replaced layer gets clipped gradients too."""
    norms = []

    def swap(runner):
        runner.model[-1] = mlp(seed=2)[-1]
        runner.optimizer = sgd(runner.model)

    def note(runner):
        norms.append(float(nn.utils.get_total_norm([each.grad for each in runner.model.parameters()])))

    clip = clips(grad_clip_fn="clip_grad_norm_", grad_clip_params={"max_norm": 1e-3})
    train(callbacks=[clip, in_epoch(2, swap), at("on_batch_end", note, order=70)], loaders=LOADERS, num_epochs=2)

    assert norms == pytest.approx([1e-3] * 12, rel=1e-2)


def test_an_optimizer_whose_parameters_nobody_trains_is_refused():
    """A replacement optimizer of another model raises the same error as the first optimizer would."""
    with pytest.raises(ValueError, match="none of which belongs to the model"):
        train(callbacks=[in_epoch(2, lambda runner: setattr(runner, "optimizer", sgd(mlp())))], num_epochs=2)


def test_another_scheduler_follows_its_own_optimizer():
    """A replacement scheduler steps once per step of its optimizer, as in a hand-written loop."""

    def swap(runner):
        runner.optimizer = sgd(runner.model)
        runner.scheduler = OneCycleLR(runner.optimizer, max_lr=1.0, total_steps=20)

    model, rates = mlp(), []
    first = sgd(model)
    note = at("on_batch_end", lambda runner: rates.append(runner.scheduler.get_last_lr()[0]))
    made = {"optimizer": first, "scheduler": OneCycleLR(first, max_lr=0.5, total_steps=20)}
    train(model, callbacks=[in_epoch(2, swap), note], loaders=LOADERS, num_epochs=2, **made)

    expected = []
    for max_lr in (0.5, 1.0):
        optimizer = sgd(mlp())
        scheduler = OneCycleLR(optimizer, max_lr=max_lr, total_steps=20)
        for _ in range(6):
            optimizer.step()
            scheduler.step()
            expected.append(scheduler.get_last_lr()[0])
    assert rates == expected
    assert not first._optimizer_step_post_hooks


def test_accumulation_may_be_shortened_within_a_step():
    """If the optimizer step is already due, it happens at the next batch."""
    stepper, pending = dl.OptimizerCallback("loss", accumulation_steps=4), []

    def shorten(runner):
        pending.append(stepper.num_pending)
        stepper.accumulation_steps = 2 if runner.batch_step >= 3 else 4

    train(callbacks=[stepper, at("on_batch_end", shorten)], loaders=LOADERS)

    assert pending == [1, 2, 3, 0, 1, 0]


class Half(dl.AccuracyCallback):
    """Metric that overrides on_batch_end and does not update the sums."""

    def on_batch_end(self, runner):
        runner.batch_metrics["accuracy"] = torch.tensor(0.5)


def test_a_metric_that_a_subclass_leaves_unsummed_is_missed():
    """A metric callback that leaves its metric unsummed raises an error, unless `totals_all = False`."""
    with pytest.raises(RuntimeError, match=r"Half left \['accuracy'\] in runner.batch_metrics and summed nothing: "):
        train(callbacks=[Half("logits", "targets")])

    averaged = Half("logits", "targets")
    averaged.totals_all = False
    assert train(callbacks=[averaged]).epoch_metrics["train"]["accuracy"] == 0.5
