"""A loader for tensors in memory that is as fast as indexing them."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Sampler, SequentialSampler

from runnerkit.data.tensor_rows import Rows, TensorRows
from runnerkit.sampling.indexed.sampler import ShardedBatchSampler
from runnerkit.sampling.sharding import Uneven, loader_seed

__all__ = ["TensorLoader"]


class TensorLoader:
    """A loader that indexes whole batches of tensors in memory, without per-sample fetching, collating or workers.

    Under an engine it yields the same batches in the same order as ``DataLoader(TensorDataset(...))`` with the same
    arguments, on any number of processes, and it resumes within an epoch.

    Args:
        tensors: (N, ...) each, on one device; or one dict of them.
        batch_size: samples per batch and process.
        shuffle: shuffle in each epoch.
        drop_last: drop the last batch if it is incomplete.
        device: device of the batches, such as "cuda"; each process moves all the data to its own device once. None
            uses the device of the tensors.

    Attributes:
        dataset: the tensors, as :class:`TensorRows`.
        batch_sampler: the order of the samples; under an engine it keeps the position within an epoch.

    >>> loader = TensorLoader(torch.arange(5), torch.arange(5) ** 2, batch_size=2)
    >>> for numbers, squares in loader:
    ...     print(numbers.tolist(), squares.tolist())
    [0, 1] [0, 1]
    [2, 3] [4, 9]
    [4] [16]
    """

    def __init__(
        self,
        *tensors: Tensor | Mapping[str, Tensor],
        batch_size: int,
        shuffle: bool = False,
        drop_last: bool = False,
        device: str | torch.device | None = None,
    ) -> None:
        self.dataset = TensorRows(*tensors, device=device)
        places = range(len(self.dataset))
        self.sampler: Sampler[int] = _Shuffled(places) if shuffle else SequentialSampler(places)
        # BatchSampler checks batch_size, and its error names the argument.
        self.batch_sampler: BatchSampler | ShardedBatchSampler = BatchSampler(self.sampler, batch_size, drop_last)
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Rows]:
        batches = list(self.batch_sampler)
        sizes = [len(batch) for batch in batches]
        # Copy all indices to the device once per epoch, so that no batch waits for its own copy.
        order = np.fromiter(chain.from_iterable(batches), dtype=np.int64, count=sum(sizes))
        parts = torch.split(torch.from_numpy(order).to(self.dataset.device), sizes)
        return map(self.dataset.__getitems__, parts)

    def shard(
        self, *, key: str, training: bool, rank: int, world_size: int, seed: int, uneven: Uneven = "drop"
    ) -> Self:
        """Return one process's share; see :func:`runnerkit.sampling.sharding.shard_loader`."""
        share = copy.copy(self)
        share.batch_sampler = ShardedBatchSampler(
            self.sampler, batch_size=self.batch_size, drop_last=self.drop_last, rank=rank, world_size=world_size,
            seed=loader_seed(seed, key), training=training,
        )  # fmt: skip
        return share


class _Shuffled(Sampler[int]):
    """RandomSampler with the same draws, listed at once, which takes half the time for a million indices."""

    shuffle = True  # predictions warn of it

    def __init__(self, places: range) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        return iter(torch.randperm(len(self), generator=generator).tolist())
