"""The base class of loaders that wrap another loader."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator
from operator import attrgetter
from typing import Any, Self

import torch

from runnerkit.sampling.feed import OuterLoader, for_device
from runnerkit.sampling.sharding import Uneven, count_batches, shard_loader, share_of
from runnerkit.sampling.share import LoaderShare
from runnerkit.types import Batch


class LoaderWrapper(OuterLoader, ABC):
    """A loader around another one; it forwards the attributes of a DataLoader, and raises if the loader lacks them.

    Args:
        loader: a DataLoader, or any iterable of batches.

    Attributes:
        origin: the wrapped loader.
    """

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

    dataset = property(attrgetter("origin.dataset"), doc="Data set of the wrapped loader.")
    batch_size = property(attrgetter("origin.batch_size"), doc="Samples per batch and process.")
    sampler = property(attrgetter("origin.sampler"), doc="Sampler of the wrapped loader.")
    batch_sampler = property(attrgetter("origin.batch_sampler"), doc="Batch sampler of the wrapped loader.")
    num_workers = property(attrgetter("origin.num_workers"), doc="Number of worker processes.")

    @property
    def _share(self) -> LoaderShare:
        return share_of(self.origin)

    def shard(
        self, *, key: str, training: bool, rank: int, world_size: int, seed: int, uneven: Uneven = "drop",
        endless: bool = False,
    ) -> Self:  # fmt: skip
        """Return a copy around one process's share; see :func:`runnerkit.sampling.sharding.shard_loader`."""
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": seed}
        share = shard_loader(self.origin, key=key, training=training, endless=endless, **place)
        return self._with_origin(share)

    def for_device(self, device: torch.device) -> Self:
        """Return a copy for a process that computes on `device`."""
        placed = for_device(self.origin, device)
        return self if placed is self.origin else self._with_origin(placed)

    def _with_origin(self, loader: Any) -> Self:
        wrapper = copy.copy(self)
        wrapper.origin = loader
        return wrapper
