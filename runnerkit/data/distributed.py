"""Distributed sharding of any sampler, for training loops that shard by sampler."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any, cast

from torch.utils.data import DistributedSampler, Sampler

from runnerkit.sampling.epochs import set_epoch
from runnerkit.sampling.indexed.sampler import seeded_order
from runnerkit.seeding.generators import derive_seed

__all__ = ["DistributedSamplerWrapper"]


class DistributedSamplerWrapper(DistributedSampler[int]):
    """Torch's DistributedSampler over the samples of another sampler instead of over a data set.

    Engines do not need it: they shard any sampler without padding. They leave this one unchanged, and it pads as
    torch's does, repeating samples until all processes have the same number.
    All processes draw the inner sampler's order from the same seed, which ``set_epoch`` determines.

    Args:
        sampler: has a length, and draws from global generators or from its own ``generator``.
        num_replicas: number of processes; by default that of the process group.
        rank: rank of the process; by default that of this process.
        shuffle: shuffle the samples of the sampler.

    >>> from torch.utils.data import WeightedRandomSampler
    >>> wrapped = WeightedRandomSampler([1.0] * 10, num_samples=6)
    >>> shares = [list(DistributedSamplerWrapper(wrapped, num_replicas=2, rank=rank)) for rank in range(2)]
    >>> [len(share) for share in shares]
    [3, 3]
    """

    def __init__(
        self,
        sampler: Sampler[int],
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
    ) -> None:
        if not isinstance(sampler, Sized):
            raise TypeError(f"{type(sampler).__name__} does not have a length, so its samples cannot be sharded")
        super().__init__(cast(Any, sampler), num_replicas=num_replicas, rank=rank, shuffle=shuffle)
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of this and the inner sampler, whose order and length may depend on it."""
        set_epoch(epoch, self.sampler)
        super().set_epoch(epoch)
        self.num_samples = math.ceil(len(self.sampler) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = seeded_order(self.sampler, derive_seed(self.seed, "order", self.epoch))
        return (order[place] for place in super().__iter__())
