"""The learning rate sweep equals a hand-written one, ends where it should, and restores the optimizer's learning
rate."""

import itertools
import math

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, sgd, train, train_by_hand, weights

NUM_STEPS = 20


def sweep(finder, model=None, optimizer=None, *, num_samples=160, **options):
    model = model or mlp()
    defaults = {"loaders": {"train": loader(num_samples, 8)}, "callbacks": [finder]}
    return train(model, optimizer=optimizer or sgd(model, lr=1e-3), **(defaults | options))


def rates(scale, *, first=1e-3, last=1.0):
    """Return the learning rates of a hand-written sweep."""
    parts = [step / (NUM_STEPS - 1) for step in range(NUM_STEPS)]
    if scale == "linear":
        return [first + (last - first) * part for part in parts]
    return [math.exp(math.log(first) + (math.log(last) - math.log(first)) * part) for part in parts]


@pytest.mark.parametrize("scale", ["log", "linear"])
@pytest.mark.parametrize("passes", [1, 2])
def test_the_sweep_is_the_one_by_hand(scale, passes):
    """Rates, losses and weights agree to 1e-6, over one pass through the loader and over several."""
    finder, mine, theirs = dl.LRFinder(1.0, scale, num_steps=NUM_STEPS), mlp(), mlp()
    num_samples = 160 // passes
    optimizer, reference = sgd(mine, lr=1e-3), sgd(theirs)

    sweep(finder, mine, optimizer, num_samples=num_samples, num_epochs=passes)
    losses = []
    for rate, batch in zip(rates(scale), itertools.cycle(loader(num_samples, 8)), strict=False):
        reference.param_groups[0]["lr"] = rate
        losses += train_by_hand(theirs, reference, [batch])

    assert finder.lrs == pytest.approx(rates(scale), rel=1e-9)
    assert finder.losses == pytest.approx([loss.item() for loss in losses], abs=1e-6)
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_the_stage_ends_with_the_sweep():
    """The number of epochs is ignored, and the evaluation afterwards has one batch."""
    finder = dl.LRFinder(1.0, num_steps=5)

    runner = sweep(finder, num_epochs=7, loaders={"train": loader(160, 8), "valid": loader(80, 8)})

    assert len(finder.lrs) == runner.stage_batch_step == 5
    assert runner.epoch_step == 1 and runner.loader_batch_step == 1


def test_a_quadratic_diverges_where_theory_says():
    """For the loss x**2 / 2, a step multiplies x by 1 - lr, so the loss falls below lr = 2 and grows beyond."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 1.0)
    loaders = {"train": [(torch.ones(4, 1), torch.zeros(4, 1))] * 100}
    finder, optimizer = dl.LRFinder(1e3, num_steps=100), torch.optim.SGD(model.parameters(), lr=1e-3)

    sweep(finder, model, optimizer, loaders=loaders, criterion=lambda x, y: (x - y).square().mean() / 2)

    assert 2 < finder.lrs[-1] < 20 and len(finder.lrs) < 100
    assert finder.losses[-1] > finder.losses[0] / 4 > finder.losses[len(finder.losses) * 3 // 4]
    assert 0.02 < finder.suggestion < 2
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_a_loss_below_zero_does_not_end_the_sweep():
    """The divergence threshold, a multiple of the loss, does not apply to negative losses, such as log-likelihoods."""
    finder = dl.LRFinder(1e-2, num_steps=NUM_STEPS)

    sweep(finder, criterion=lambda logits, targets: nn.functional.cross_entropy(logits, targets) - 10)

    assert len(finder.lrs) == NUM_STEPS


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_sweep(bad):
    """The sweep ends at once, and the suggestion uses the losses before."""
    losses = iter([1.0, 0.5, bad])
    finder = dl.LRFinder(1.0)

    sweep(finder, criterion=lambda logits, _: logits.sum() * 0 + next(losses))

    assert len(finder.losses) == 3 and not math.isfinite(finder.losses[2])
    assert finder.suggestion == finder.lrs[1] / 10


def test_groups_keep_their_ratio():
    """The recorded rates are those of the first group."""
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 1e-2}]
    seen = []

    class See(dl.Callback):
        def on_batch_end(self, runner):
            seen.append([group["lr"] for group in runner.optimizer.param_groups])

    finder, optimizer = dl.LRFinder(1.0), torch.optim.SGD(groups, lr=1e-3)
    sweep(finder, model, optimizer, callbacks=[finder, See(order=dl.CallbackOrder.Optimizer)])

    assert [first for first, _ in seen] == pytest.approx(finder.lrs)
    assert [second / first for first, second in seen] == pytest.approx([10.0] * NUM_STEPS)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-3, 1e-2]


def test_a_resumed_sweep_is_the_whole_one(tmp_path):
    """A sweep that failed in its second pass restarts from the beginning of that pass."""
    whole, parts = (dl.LRFinder(1.0, num_steps=NUM_STEPS) for _ in range(2))

    options = {"num_samples": 80, "num_epochs": 2, "logdir": tmp_path, "resume": "auto"}
    sweep(whole, num_samples=80, num_epochs=2)
    with pytest.raises(KeyboardInterrupt):
        sweep(parts, callbacks=[parts, Interrupt(14, "on_batch_start")], **options)
    parts = dl.LRFinder(1.0, num_steps=NUM_STEPS)
    sweep(parts, **options)

    assert (parts.lrs, parts.losses, parts.suggestion) == (whole.lrs, whole.losses, whole.suggestion)


def test_two_processes_agree_on_one_sweep():
    """Losses are means over both processes, and the calling process receives them."""
    one, two = dl.LRFinder(1.0), dl.LRFinder(1.0)

    sweep(one, loaders={"train": loader(160, 16)})
    sweep(two, loaders={"train": loader(160, 8)}, ddp=True)

    assert two.lrs == one.lrs and len(two.lrs) == 10
    assert two.losses == pytest.approx(one.losses, abs=1e-6)


def test_the_plot_is_a_picture(tmp_path):
    """`plot` writes a PNG file."""
    finder = dl.LRFinder(1.0)
    sweep(finder)

    path = finder.plot(tmp_path / "plots" / "lr.png")

    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_stage_too_short_says_so(caplog):
    """The optimizer's learning rate is restored all the same."""
    model = mlp()
    optimizer = sgd(model, lr=1e-3)

    sweep(dl.LRFinder(1.0, num_steps=50), model, optimizer)

    assert "the stage ended after 20 of LRFinder's 50 batches" in caplog.text
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_the_loss_may_be_a_number():
    """A runner that makes its own steps may store ``loss.item()``."""

    class Own(dl.Runner):
        def handle_batch(self, batch):
            features, targets = batch
            loss = self.criterion(self.model(features), targets)
            self.batch_metrics["loss"] = loss.item()
            if self.is_train_loader:
                self.learn(loss)

    finder = dl.LRFinder(1.0, num_steps=5)

    sweep(finder, runner=Own())

    assert len(finder.losses) == 5
