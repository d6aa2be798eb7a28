"""Weights that `handle_batch` changes in place between two forward passes, as SAM does, against hand-written loops."""

import pytest
import torch
from torch.nn import functional as F

from runnerkit import dl
from tests.programs.sam import climb, put_back
from tests.tiny import loader, mlp, sgd, train, weights


class SAM(dl.Runner):
    """Climbs along the gradient, and steps with the gradient found there."""

    reads_scaled = False

    def handle_batch(self, batch):
        features, targets = batch
        optimizer, model = self.optimizer, self.model
        self.engine.zero_grad(optimizer)
        self.batch_metrics["loss"] = loss = F.cross_entropy(model(features), targets)
        self.engine.backward(loss)
        if not self.reads_scaled:
            self.engine.unscale(optimizer)
        before = climb(model)
        self.engine.zero_grad(optimizer)
        self.engine.backward(F.cross_entropy(model(features), targets))
        put_back(model, before)
        self.engine.step(optimizer)


def by_hand(dtype, **scaler):
    """Each forward pass has an autocast region of its own."""
    model = mlp()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype == torch.float16, **scaler)
    for features, targets in loader(32, 8):
        for is_second in (False, True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(features), targets)
            scaler.scale(loss).backward()
            if not is_second:
                scaler.unscale_(optimizer)
                before = climb(model)
                scaler.update()
        put_back(model, before)
        scaler.step(optimizer)
        scaler.update()
    return weights(model)


def fit(runner, precision):
    engine = dl.CPUEngine(precision=precision)
    return weights(train(runner=runner, criterion=None, loaders={"train": loader(32, 8)}, engine=engine).model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_second_forward_pass_sees_the_climbed_weights(dtype):
    """Bit for bit, although autocast keeps its casts of the weights within handle_batch."""
    precision = dl.AMP(dtype, scaler={"init_scale": 2.0**10})

    assert torch.equal(fit(SAM(), precision), by_hand(dtype, init_scale=2.0**10))


def test_a_step_with_gradients_that_overflow_leaves_the_weights():
    """The first scales overflow: the climb is NaN, the step is skipped, and the weights are those before it."""
    found = fit(SAM(), dl.AMP(torch.float16, scaler={"init_scale": 2.0**60}))

    assert torch.equal(found, weights(mlp()))


def test_climbing_along_scaled_gradients_raises():
    """Under float16 the gradients of engine.backward are scaled; the error names what to call."""
    runner = SAM()
    runner.reads_scaled = True

    with pytest.raises(RuntimeError, match=r"self\.engine\.unscale\(optimizer\)"):
        fit(runner, dl.AMP(torch.float16, scaler={"init_scale": 2.0**10}))


def test_weights_clipped_after_a_step_are_no_climb():
    """WGAN's clipping follows a step, and a second loss before it: neither reads gradients."""

    class Clipped(dl.Runner):
        def handle_batch(self, batch):
            for _ in range(2):
                self.engine.zero_grad(self.optimizer)
                self.engine.backward(F.cross_entropy(self.model(batch[0]), batch[1]))
                self.engine.backward(self.model(batch[0]).square().mean())
                self.engine.step(self.optimizer)
                with torch.no_grad():
                    for each in self.model.parameters():
                        each.clamp_(-0.1, 0.1)

    assert fit(Clipped(), dl.AMP(torch.float16)).abs().max() < 0.1001
