"""The base class of loaders that wrap another loader."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Self

import torch

from runnerkit.sampling.sampler import Uneven
from runnerkit.sampling.sharding import count_batches, shard_loader, share_of
from runnerkit.sampling.share import LoaderShare
from runnerkit.types import Batch


class LoaderWrapper(ABC):
    """A loader around another one; it forwards the attributes of a DataLoader, and raises if the loader lacks them.

    Args:
        loader: a DataLoader, or any iterable of batches.

    Attributes:
        origin: the wrapped loader.
    """

    wraps_loader = True

    def __init__(self, loader: Any) -> None:
        self.origin = loader

    @abstractmethod
    def __iter__(self) -> Iterator[Batch]:
        """Start a pass and create the iterator of the wrapped loader now, before the first batch is requested."""

    def __len__(self) -> int:
        length = count_batches(self.origin)
        if length is None:
            raise TypeError(f"a {type(self.origin).__name__} does not have a length")
        return length

    @property
    def dataset(self) -> Any:
        """Data set of the wrapped loader."""
        return self.origin.dataset

    @property
    def batch_size(self) -> Any:
        """Samples per batch and process."""
        return self.origin.batch_size

    @property
    def sampler(self) -> Any:
        """Sampler of the wrapped loader, such as a user-defined DistributedSampler with ``set_epoch``."""
        return self.origin.sampler

    @property
    def batch_sampler(self) -> Any:
        """Batch sampler of the wrapped loader, which keeps the position within an epoch."""
        return self.origin.batch_sampler

    @property
    def num_workers(self) -> Any:
        """Number of worker processes."""
        return self.origin.num_workers

    @property
    def _share(self) -> LoaderShare:
        return share_of(self.origin)

    def shard(
        self, *, key: str, training: bool, rank: int, world_size: int, seed: int, uneven: Uneven = "drop",
        endless: bool = False,
    ) -> Self:  # fmt: skip
        """Return a copy around one process's shard; see :func:`runnerkit.sampling.sharding.shard_loader`."""
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": seed}
        share = shard_loader(self.origin, key=key, training=training, endless=endless, **place)
        return self._around(share)

    def for_device(self, device: torch.device) -> Self:
        """Return a copy for a process that computes on `device`."""
        place = getattr(self.origin, "for_device", None)
        return self._around(place(device)) if callable(place) else self

    def _around(self, loader: Any) -> Self:
        wrapper = copy.copy(self)
        wrapper.origin = loader
        return wrapper
