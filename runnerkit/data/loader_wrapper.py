"""The base of loaders that hold another one."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import torch

from runnerkit.sampling.sampler import Uneven
from runnerkit.sampling.sharding import count_batches, shard_loader, share_of
from runnerkit.types import Batch


class LoaderWrapper(ABC):
    """A loader around another one, whose attributes it shows: those that it lacks are lacking here too.

    Args:
        loader: a DataLoader, or any iterable of batches.

    Attributes:
        origin: that loader.
    """

    def __init__(self, loader: Any) -> None:
        self.origin = loader

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Begin a pass; the held loader's iterator is made here, and not with the first batch."""

    def __len__(self) -> int:
        length = count_batches(self.origin)
        if length is None:
            raise TypeError(f"a {type(self.origin).__name__} has no length")
        return length

    @property
    def dataset(self) -> Any:
        """Its data set."""
        return self.origin.dataset

    @property
    def batch_size(self) -> Any:
        """Samples of one process in a batch."""
        return self.origin.batch_size

    @property
    def sampler(self) -> Any:
        """Where ``set_epoch`` of a user's own DistributedSampler is."""
        return self.origin.sampler

    @property
    def batch_sampler(self) -> Any:
        """Where the position within an epoch is."""
        return self.origin.batch_sampler

    @property
    def num_workers(self) -> Any:
        """Processes that fetch."""
        return self.origin.num_workers

    @property
    def _share(self) -> Any:
        return share_of(self.origin)

    def shard(
        self, *, key: str, training: bool, rank: int, world_size: int, seed: int, uneven: Uneven = "drop"
    ) -> Self:
        """Return the same around one process's share; see :func:`runnerkit.sampling.sharding.shard_loader`."""
        share = shard_loader(
            self.origin, key=key, training=training, rank=rank, world_size=world_size, seed=seed, uneven=uneven
        )
        return self._around(share)

    def for_device(self, device: torch.device) -> Self:
        """Return the same for a process that computes on `device`."""
        place = getattr(self.origin, "for_device", None)
        return self._around(place(device)) if callable(place) else self

    def _around(self, loader: Any) -> Self:
        wrapper = copy.copy(self)
        wrapper.origin = loader
        return wrapper
