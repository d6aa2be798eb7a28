"""A sampler of ten thousand million draws, of which a budget of steps takes the first few."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import RandomSampler

from runnerkit import dl
from runnerkit.sampling.sharding import loader_seed
from runnerkit.seeding.generators import derive_seed
from tests.programs.common import loader, network, points

NUM_DRAWS, NUM_STEPS = 10**10, 7


def sampler_of(data):
    """Return the sampler with the seed that a run gives it, so that the loop sees the same samples."""
    generator = torch.Generator().manual_seed(derive_seed(loader_seed(42, "train"), "order", 1))
    return RandomSampler(data, replacement=True, num_samples=NUM_DRAWS, generator=generator)


def loop(batch_size):
    data, model, losses = points(29), network(2, 8, 2), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for values, targets in loader(data, batch_size, sampler=sampler_of(data)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(values), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if len(losses) == NUM_STEPS:
            return model, losses
    raise AssertionError


def train(batch_size, *, num_steps=NUM_STEPS, **options):
    data = points(29)
    sampler = RandomSampler(data, replacement=True, num_samples=NUM_DRAWS, generator=torch.Generator())
    return dl.SupervisedRunner().train(
        model=network(2, 8, 2),
        criterion=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        loaders={"train": loader(data, batch_size, sampler=sampler)},
        num_steps=num_steps,
        **options,
    )
