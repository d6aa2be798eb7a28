"""Networks and data that the programs share; float64 is torch's default dtype while they run."""

from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network(*sizes: int, seed: int = 1) -> nn.Sequential:
    """Create a perceptron of these layer sizes with weights drawn from `seed`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [each for pair in pairwise(sizes) for each in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def points(num_points: int) -> TensorDataset:
    """Draw points (N, 2) and their class, one of two."""
    values = torch.randn(num_points, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(values, (values.prod(dim=1) > 0).long())


def loader(data, batch_size: int, **options) -> DataLoader:
    """Create a loader that, with a generator of its own, draws no seed from the global one at the start of an epoch."""
    return DataLoader(data, batch_size=batch_size, generator=torch.Generator(), **options)
