"""MAML: the loss of each task is taken after a step on it, and differentiated through that step."""

import torch
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from runnerkit import dl
from tests.programs.common import loader, network


def sines(num_tasks):
    """Draw tasks, sine curves of different heights and phases: x and y of ten points each."""
    generator = torch.Generator().manual_seed(3)
    x = 4 * torch.rand(num_tasks, 10, 1, generator=generator) - 2
    height, phase = 1 + torch.rand(2, num_tasks, 1, 1, generator=generator)
    return TensorDataset(x, height * torch.sin(x + phase))


def loss_of_task(model, x, y):
    """Make a step on the first five points of a task; return the loss of the others."""
    weights = dict(model.named_parameters())
    loss = F.mse_loss(functional_call(model, weights, x[:5]), y[:5])
    slopes = torch.autograd.grad(loss, weights.values(), create_graph=True)
    adapted = {key: each - 0.1 * slope for (key, each), slope in zip(weights.items(), slopes, strict=True)}
    return F.mse_loss(functional_call(model, adapted, x[5:]), y[5:])


def loop(batch_size):
    model, losses = network(1, 8, 1), []
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(2):
        for x, y in loader(sines(17), batch_size):
            optimizer.zero_grad()
            loss = torch.stack([loss_of_task(model, *task) for task in zip(x, y, strict=True)]).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    return model, losses


class Program(dl.Runner):
    steps_itself = True

    def handle_batch(self, batch):
        loss = torch.stack([loss_of_task(self.model, *task) for task in zip(*batch, strict=True)]).mean()
        self.learn(loss)
        self.batch_metrics["loss"] = loss


def train(batch_size, **options):
    return Program().train(
        model=network(1, 8, 1),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.02),
        loaders={"train": loader(sines(17), batch_size)},
        num_epochs=2,
        **options,
    )
