"""SAM: each step uses the gradient at the weights to which a first gradient leads."""

import torch
from torch import nn
from torch.nn import functional as F

from runnerkit import dl
from tests.programs.common import loader, network, points

RHO = 0.5


@torch.no_grad()
def climb(model):
    """Move the weights by RHO along their gradient; return those before."""
    before = [each.clone() for each in model.parameters()]
    norm = nn.utils.get_total_norm([each.grad for each in model.parameters()])
    for each in model.parameters():
        each.add_(each.grad * (RHO / (norm + 1e-12)))
    return before


@torch.no_grad()
def put_back(model, before):
    for each, value in zip(model.parameters(), before, strict=True):
        each.copy_(value)


def loop(batch_size):
    model, losses = network(2, 8, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        for values, targets in loader(points(25), batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(values), targets)
            loss.backward()
            before = climb(model)
            optimizer.zero_grad()
            F.cross_entropy(model(values), targets).backward()
            put_back(model, before)
            optimizer.step()
            losses.append(loss.detach())
    return model, losses


class Program(dl.Runner):
    steps_itself = True

    def handle_batch(self, batch):
        values, targets = batch
        self.batch_metrics["loss"] = loss = F.cross_entropy(self.model(values), targets)
        self.engine.zero_grad(self.optimizer)
        self.engine.backward(loss)
        self.engine.unscale(self.optimizer)
        before = climb(self.model)
        self.learn(F.cross_entropy(self.model(values), targets), clip=lambda _: put_back(self.model, before))


def train(batch_size, **options):
    return Program().train(
        model=network(2, 8, 2),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        loaders={"train": loader(points(25), batch_size)},
        num_epochs=2,
        **options,
    )
