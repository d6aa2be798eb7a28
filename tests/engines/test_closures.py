"""Tests of an optimizer that evaluates the loss several times in a step, under every engine."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests import tiny
from tests.engines.on_cpu import ddp, fsdp
from tests.tiny import classification, mlp, weights

FEATURES, TARGETS = classification(32).tensors
OPTIONS = {"lr": 0.1, "max_iter": 4}


class ClosureRunner(dl.Runner):
    """The closure clears, computes and averages the gradients."""

    def handle_batch(self, batch):
        features, targets = batch

        def closure():
            self.engine.zero_grad(self.optimizer)
            loss = nn.functional.cross_entropy(self.model(features), targets)
            self.engine.backward(loss)
            return loss

        self.batch_metrics["loss"] = (self.optimizer.step(closure) if self.is_train_loader else closure()).detach()


def model_of(sizes):
    if sizes == "odd":
        return mlp().double()
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def by_hand(model):
    """Two steps of torch's LBFGS on all samples."""
    optimizer = torch.optim.LBFGS(model.parameters(), **OPTIONS)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(FEATURES.double()), TARGETS)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return weights(model)


def train(engine, model, *, batch_size):
    data = DataLoader(TensorDataset(FEATURES.double(), TARGETS), batch_size=batch_size)
    optimizer = torch.optim.LBFGS(model.parameters(), **OPTIONS)
    options = {"optimizer": optimizer, "loaders": {"train": data}, "num_epochs": 2}
    return weights(tiny.train(model, runner=ClosureRunner(), engine=engine, **options).model)


@pytest.mark.parametrize(
    ("engine", "batch_size", "sizes"),
    [
        (dl.CPUEngine(), 32, "odd"),
        (dl.DataParallelEngine("cpu"), 32, "odd"),
        (ddp(), 16, "odd"),
        (fsdp(), 16, "even"),
    ],
    ids=["CPU", "DataParallel", "DDP", "FSDP2"],
)
def test_lbfgs_steps_as_by_hand_on_the_joined_batch(engine, batch_size, sizes):
    """The reference is torch's optimizer in one process; only the order of sums differs."""
    expected = by_hand(model_of(sizes))

    torch.testing.assert_close(train(engine, model_of(sizes), batch_size=batch_size), expected, rtol=1e-9, atol=1e-12)


def test_lbfgs_of_unevenly_sharded_parameters_raises():
    """LBFGS flattens all parameters, which torch cannot do with shards of different sizes."""
    with pytest.raises(RuntimeError, match="unevenly sharded"):
        train(fsdp(), model_of("odd"), batch_size=16)
