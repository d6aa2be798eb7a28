"""Engines of several processes on the CPU, and what their tests train with."""

import torch

from runnerkit import dl
from tests.tiny import weights


def ddp(num_processes=2, **options):
    return dl.DistributedDataParallelEngine(num_processes, **{"device": "cpu", "timeout_s": 60, **options})


def fsdp(num_processes=2, **options):
    return dl.FullyShardedDataParallelEngine(num_processes, **{"device": "cpu", "timeout_s": 60, **options})


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def difference(model, other):
    """Return the largest difference of a weight or a buffer."""
    return (weights(model) - weights(other)).abs().max().item()


class TwoStages(dl.SupervisedRunner):
    """A runner that trains the same objects twice."""

    stages = ("first", "second")
