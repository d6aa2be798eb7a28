"""One global order of samples, and each process's share of it.

The order of an epoch is a function of (seed, epoch), the same on every process and for any number of them. A global
batch is `batch_size * world_size` consecutive samples of it; rank r takes every world_size-th, from r on. So N
processes see together, batch by batch, what one process with an N times larger batch would see.
"""

import copy
import logging
import random
from collections.abc import Iterable, Iterator, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, Sampler

from runnerkit.seeding import derive_seed, keep_rng

logger = logging.getLogger(__name__)


class ShardedBatchSampler(Sampler[list[int]]):
    """The batches of one process: every sample of the data set exactly once over all processes, none padded.

    Args:
        sampler: gives the order of the whole data set; iterated with every generator seeded by (seed, epoch).
        batch_size: samples of one process in one batch.
        drop_last: drop the last global batch if it is short.
        rank, world_size: which share.
        seed: with the epoch it fixes the order.
    """

    def __init__(
        self, sampler: Iterable[int], *, batch_size: int, drop_last: bool, rank: int, world_size: int, seed: int
    ) -> None:
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.num_consumed = 0
        self.order: list[int] = []  # of the pass under way, all processes' together

    def set_epoch(self, epoch: int) -> None:
        """Take the order of `epoch`, from its first sample on."""
        self.epoch = epoch
        self.num_consumed = 0
        set_epoch(self.sampler, epoch)

    def position_after(self, num_batches: int) -> int:
        """How much of the epoch's global order all processes have consumed after `num_batches` of this one."""
        return self.num_consumed + num_batches * self.batch_size * self.world_size

    def skip(self, position: int) -> None:
        """Leave out what was consumed before an interruption; valid until the next epoch."""
        self.num_consumed = position

    def __iter__(self) -> Iterator[list[int]]:
        self.order = order = seeded_order(self.sampler, derive_seed(self.seed, "order", self.epoch))
        for start, stop in self._global_batches(len(order)):
            share = order[start:stop][self.rank :: self.world_size]
            if share:
                yield share

    def __len__(self) -> int:
        assert isinstance(self.sampler, Sized)
        batches = self._global_batches(len(self.sampler))
        return sum(stop - start > self.rank for start, stop in batches)

    def _global_batches(self, num_samples: int) -> list[tuple[int, int]]:
        size = self.batch_size * self.world_size
        starts = list(range(self.num_consumed, num_samples, size))
        stops = [min(start + size, num_samples) for start in starts]
        if starts and self.drop_last and stops[-1] - starts[-1] < size:
            starts, stops = starts[:-1], stops[:-1]
        # A short tail that would give a process less than two samples joins the batch before it: nobody is left
        # without a batch that the others wait for, batch norm has a variance, and nothing is padded or dropped.
        tail = stops[-1] - starts[-1] if starts else size
        if self.world_size > 1 and len(starts) > 1 and tail < min(size, 2 * self.world_size):
            del starts[-1], stops[-2]
        return list(zip(starts, stops, strict=True))


class ShardedBatches(Sampler[list[int]]):
    """Every world_size-th batch of the user's own batch sampler, whose batches stay whole.

    Args:
        batch_sampler: yields lists of indices; iterated with every generator seeded by (seed, epoch).
        training: all processes get the same number of batches, so up to world_size - 1 of the last are dropped.
    """

    def __init__(
        self, batch_sampler: Iterable[list[int]], *, training: bool, rank: int, world_size: int, seed: int
    ) -> None:
        self.batch_sampler = batch_sampler
        self.training = training
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.epoch = 0
        self.num_consumed = 0
        self.order: list[list[int]] = []  # of the pass under way, all processes' together

    def set_epoch(self, epoch: int) -> None:
        """Take the order of `epoch`, from its first batch on."""
        self.epoch = epoch
        self.num_consumed = 0
        set_epoch(self.batch_sampler, epoch)

    def position_after(self, num_batches: int) -> int:
        """How many batches of all processes are consumed after `num_batches` of this one."""
        return self.num_consumed + num_batches * self.world_size

    def skip(self, position: int) -> None:
        """Leave out what was consumed before an interruption; valid until the next epoch."""
        self.num_consumed = position

    def __iter__(self) -> Iterator[list[int]]:
        self.order = batches = seeded_order(self.batch_sampler, derive_seed(self.seed, "order", self.epoch))
        yield from (batches[index] for index in self._share(len(batches)))

    def __len__(self) -> int:
        assert isinstance(self.batch_sampler, Sized)
        return len(self._share(len(self.batch_sampler)))

    def _share(self, num_batches: int) -> range:
        stop = num_batches - (num_batches - self.num_consumed) % self.world_size if self.training else num_batches
        return range(self.num_consumed + self.rank, stop, self.world_size)


def seeded_order(sampler: Any, seed: int) -> list[Any]:
    """List what `sampler` yields when every generator it may draw from starts at `seed`.

    The generators of the process stay as they were; a generator of the sampler's own is re-seeded from its own seed.
    """
    inner = getattr(sampler, "sampler", sampler)  # a BatchSampler holds the one that draws
    generator = getattr(inner, "generator", None)
    with keep_rng():
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        if not isinstance(generator, torch.Generator):
            return list(sampler)
        state = generator.get_state()
        generator.manual_seed(derive_seed(generator.initial_seed(), seed))
        try:
            return list(sampler)
        finally:
            generator.set_state(state)


def set_epoch(holder: Any, epoch: int) -> None:
    """Call ``set_epoch`` on `holder` if it has one."""
    if callable(getattr(holder, "set_epoch", None)):
        holder.set_epoch(epoch)


def count_batches(loader: Any) -> int | None:
    """Return the length of `loader`, or None if it has none (a DataLoader over a stream only looks as if it had)."""
    try:
        return len(loader)
    except TypeError:
        return None


def shard_loader(loader: Any, *, key: str, training: bool, rank: int, world_size: int, seed: int) -> Any:
    """Give this process its share of `loader`, keeping every attribute that the user set.

    A DistributedSampler of the user's own is left alone. With one process, what is no DataLoader, streams, or does
    its own batching is left alone too.

    Args:
        loader: a DataLoader (or subclass), or any iterable of batches.
        key: the loader's key, for messages.
        training: whether the batches are trained on, so that all processes need equally many.
    Raises:
        TypeError: with several processes, a loader that cannot be sharded exactly.
        ValueError: fewer samples to train on than processes.
    """
    if (
        not isinstance(loader, DataLoader)
        or isinstance(loader.dataset, IterableDataset)
        or loader.batch_sampler is None
    ):
        if world_size > 1:
            raise TypeError(
                f"loader {key!r} cannot be shared exactly among {world_size} processes: {_why_not(loader)}; "
                "use a DataLoader over a data set with __len__ and __getitem__"
            )
        return loader
    batch_sampler, sampler = loader.batch_sampler, loader.sampler
    if isinstance(sampler, DistributedSampler) or isinstance(
        getattr(batch_sampler, "sampler", None), DistributedSampler
    ):
        if not training and len(loader.dataset) % world_size:  # type: ignore[arg-type]  # map-style: it has a length
            logger.warning(
                "loader %r: its own DistributedSampler repeats samples to fill %d processes, which are scored twice; "
                "leave the sampler out for exact evaluation",
                key,
                world_size,
            )
        return loader
    sharded: ShardedBatchSampler | ShardedBatches
    if type(batch_sampler) is BatchSampler and isinstance(sampler, Sized):
        if training and len(sampler) < world_size:
            raise ValueError(f"loader {key!r} has {len(sampler)} samples, too few to train {world_size} processes")
        sharded = ShardedBatchSampler(
            batch_sampler.sampler, batch_size=batch_sampler.batch_size, drop_last=batch_sampler.drop_last,
            rank=rank, world_size=world_size, seed=seed,
        )  # fmt: skip
    else:
        sharded = ShardedBatches(batch_sampler, training=training, rank=rank, world_size=world_size, seed=seed)
    # DataLoader refuses another batch_sampler after __init__, and calling __init__ again would lose what a subclass
    # or the user set. A copy of its attributes keeps workers, collate_fn, generator and all the rest.
    shard = copy.copy(loader)
    vars(shard)["batch_sampler"] = sharded
    shard._iterator = None  # persistent workers belong to one loader
    return shard


def _why_not(loader: Any) -> str:
    if not isinstance(loader, DataLoader):
        return f"it is a {type(loader).__name__}, not a DataLoader"
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is an IterableDataset"
    return "batch_size=None turns batching off"
