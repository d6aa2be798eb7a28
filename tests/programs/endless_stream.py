"""A stream that never ends, in epochs of three steps."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

from runnerkit import dl
from tests.programs.common import loader, network

NUM_STEPS = 7


class Stream(IterableDataset):
    def __iter__(self):
        generator = torch.Generator().manual_seed(0)
        while True:
            values = torch.randn(2, generator=generator)
            yield values, (values.prod() > 0).long()


def loop(batch_size):
    model, losses = network(2, 8, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for values, targets in loader(Stream(), batch_size):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(values), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == NUM_STEPS:
            return model, losses
    raise AssertionError


def train(batch_size, *, num_steps=NUM_STEPS, **options):
    return dl.SupervisedRunner().train(
        model=network(2, 8, 2),
        criterion=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        loaders={"train": loader(Stream(), batch_size)},
        epoch_steps=3,
        num_steps=num_steps,
        **options,
    )
