"""Any sampler's samples shared among processes, for loops that shard by sampler."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sized
from typing import Any

from torch.utils.data import Dataset, DistributedSampler, Sampler

from runnerkit.sampling.sampler import seeded_order, set_epoch
from runnerkit.seeding import derive_seed


class DistributedSamplerWrapper(DistributedSampler[int]):
    """Torch's DistributedSampler over what another sampler gives, not over a data set.

    The engine needs none: it shares the samples of any sampler by itself, and pads nothing. One that a user brings is
    left alone, and pads as torch's does: samples are repeated until all processes have equally many.
    All processes draw the inner sampler's order from the same seed, which follows from ``set_epoch``.

    Args:
        sampler: has a length, and draws from global generators or from a ``generator`` of its own.
        num_replicas: processes; by default those of the process group.
        rank: which of them; by default this one.
        shuffle: shuffle what the sampler gives.

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
            raise TypeError(f"{type(sampler).__name__} has no length, so its samples cannot be shared equally")
        super().__init__(_Places(sampler), num_replicas=num_replicas, rank=rank, shuffle=shuffle)
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Take the order of `epoch`, and so does the inner sampler, whose length may change with it."""
        set_epoch(epoch, self.sampler)
        super().set_epoch(epoch)
        self.num_samples = math.ceil(len(self.sampler) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        order = seeded_order(self.sampler, derive_seed(self.seed, "order", self.epoch))
        return (order[place] for place in super().__iter__())


class _Places(Dataset[Any]):
    """As many as the sampler gives samples."""

    def __init__(self, sampler: Sized) -> None:
        self._sampler = sampler

    def __len__(self) -> int:
        return len(self._sampler)
