"""Clipping and norms of sparse gradients, against dense ones."""

import pytest
import torch
from torch import nn

from runnerkit import dl
from tests.tiny import train

ROWS = torch.tensor([[1, 1, 2], [0, 2, 2], [5, 1, 4], [3, 3, 3]])  # several times in a batch, and in accumulated ones
TARGETS = torch.tensor([0, 1, 1, 0])


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.head = nn.Embedding(8, 3, sparse=sparse), nn.Linear(3, 2)

    def forward(self, rows):
        return self.head(self.table(rows).sum(dim=1)) * 5


class Learner(dl.SupervisedRunner):
    """A runner that makes its own steps."""

    steps_itself = True

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.learn(self.criterion(self.batch["logits"], self.batch["targets"]))


def trained(sparse, *, steps_itself=False, **options):
    model = Words(sparse)
    loaders = {"train": torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ROWS, TARGETS), 1)}
    runner, optimizer = Learner() if steps_itself else None, torch.optim.SGD(model.parameters(), lr=0.5)
    runner = train(model, runner=runner, optimizer=optimizer, loaders=loaders, num_epochs=2, **options)
    return [each.detach() for each in model.parameters()], dict(runner.epoch_metrics["train"])


def clamp(parameters):
    for each in parameters:
        each.grad.clamp_(-0.1, 0.1)


def clip(callback=dl.OptimizerCallback, **options):
    return {"callbacks": [callback(**options)]}


LARGEST = {"max_norm": 0.3, "norm_type": float("inf")}
AFTER_BACKWARD = {"metric_key": "loss", "grad_clip_params": {"max_norm": 0.5}, "log_gradient": True}
OPTIONS = {
    "gradient_clip": lambda: {"gradient_clip": 0.5},
    "accumulated": lambda: {"gradient_clip": 0.5, "accumulation_steps": 2},
    "largest": lambda: clip(grad_clip_fn="clip_grad_norm_", grad_clip_params=LARGEST),
    "value": lambda: clip(grad_clip_value=0.1),
    "function": lambda: clip(grad_clip_fn=clamp),
    "after backward": lambda: clip(dl.BackwardCallback, grad_clip_fn="clip_grad_norm_", **AFTER_BACKWARD),
    "logged": lambda: {"gradient_clip": 0.5, **clip(dl.GradNormCallback, per_parameter=True)},
    "learn": lambda: {"gradient_clip": 0.5, "steps_itself": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_sparse_gradients_are_clipped_and_measured_as_dense_ones(name):
    """A norm is that of the sums of a row's values, as a batch may look a row up several times."""
    found, metrics = trained(True, **OPTIONS[name]())

    expected, expected_metrics = trained(False, **OPTIONS[name]())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert metrics == pytest.approx(expected_metrics, rel=1e-5)


def test_the_reference_is_the_loop_by_hand():
    """With dense gradients."""
    found, _ = trained(True, gradient_clip=0.5)

    model = Words(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for row, target in zip(ROWS, TARGETS, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(row[None]), target[None]).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    torch.testing.assert_close(found, [each.detach() for each in model.parameters()], rtol=0, atol=1e-6)
