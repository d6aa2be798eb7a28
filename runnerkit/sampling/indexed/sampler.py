"""One global order of samples, and each process's share of it.

The order of an epoch is a function of (seed, epoch), the same on every process and for any number of them. A global
batch is `batch_size * world_size` consecutive samples of it; rank r takes every world_size-th, starting at r. So N
processes together see, batch by batch, what one process with an N times larger batch would see.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence, Sized
from itertools import chain, islice
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch.utils.data import BatchSampler, Dataset, Sampler, SequentialSampler

from runnerkit.sampling.loader_members import DatasetMembers, SamplerMembers
from runnerkit.sampling.orders import EndedOrder, Order
from runnerkit.sampling.share import DividedShare, PassPosition
from runnerkit.seeding.generators import derive_seed, keep_rng, seed_generators

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Position of a sample in an epoch, and its index."""

    epoch: int
    position: int  # in the order of the whole epoch: the same for any number of processes
    index: Any  # passed to the data set


class PlacedBatch(NamedTuple):
    """Places of a batch's samples as one object: a tuple per sample would cost a third of a microsecond each."""

    epoch: int
    positions: range
    indices: list[Any]

    def part(self, start: int, stop: int) -> PlacedBatch:
        """Return the samples from `start` up to, but not including, `stop`."""
        return PlacedBatch(self.epoch, self.positions[start:stop], self.indices[start:stop])


_LONG = 10_000_000  # items; a list of so many takes 0.4 GB
_BATCH_STRIDE = 1_000_003  # distance between the positions of whole batches; odd, as torch takes seeds modulo 2**32


class IndexedShare(DividedShare, Sampler[Any]):
    """A share of what a sampler yields, all of which a process lists when a pass begins.

    Args:
        sampler: iterated with every generator seeded by (seed, epoch).
        place: arguments of the base class.
    """

    epoch = 0
    _expected: int | None = None  # the fingerprint of the order before the interruption
    _num_needed = sys.maxsize  # of the order
    _stop = sys.maxsize  # of the pass, in samples
    order: Any

    def __init__(self, sampler: Iterable[Any], **place: Any) -> None:
        super().__init__(**place)
        self.sampler: Any = sampler
        self.order = []

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.num_consumed, self.order, self._expected = epoch, 0, [], None
        self._stop = self._num_needed = sys.maxsize

    def need(self, num_batches: int) -> None:
        if isinstance(self.sampler, Sized) and len(self.sampler) > _LONG:
            self._num_needed = self.num_consumed + num_batches * self.stride

    def skip(self, position: PassPosition) -> None:
        self.num_consumed = position

    def fingerprint(self, position: PassPosition) -> int | None:
        if not isinstance(self.order, list) or not isinstance(position, int):
            return None  # files in lanes, whose order follows from the seed
        if len(self.order) < position:
            return self._expected  # not listed since the pass was resumed
        return _checksum(self.order[max(0, position - 1000) : position])

    def ended_order(self) -> EndedOrder | None:
        inner = _innermost(self.sampler)
        if tells_its_length(inner) or DatasetMembers(inner).set_epoch is not None or not isinstance(self.order, list):
            return None
        checksum = _checksum(self.order) if self.order else None
        if checksum is None:
            return None
        length, num_listed = len(self.sampler), len(self.order)
        return {"epoch": self.epoch, "seed": self.seed, "length": length, "listed": num_listed, "checksum": checksum}

    def repeat_order(self, ended: EndedOrder) -> None:
        if (ended["seed"], ended["length"]) != (self.seed, len(self.sampler)):
            return
        seed = derive_seed(self.seed, "order", ended["epoch"])
        order = seeded_order(self.sampler, seed, at_most=ended["listed"])
        if _checksum(order) != ended["checksum"] and self.rank == 0:
            logger.warning(
                "the next epochs are in another order than those of a run that was not interrupted: %s keeps a state "
                "of its own, or was made otherwise; give it a set_epoch(epoch) that determines its order",
                type(self.sampler).__name__,
            )

    def expect(self, fingerprint: int | None) -> None:
        self._expected = fingerprint

    def described(self) -> Order:
        inner = self.sampler.sampler if isinstance(self.sampler, BatchSampler) else self.sampler
        members = SamplerMembers(inner)
        options = members.order_options or {"replacement": members.replacement, "shuffle": members.shuffle}
        words = ", ".join(f"{name}={value}" for name, value in options.items() if value)
        return {
            "length": len(self.sampler),
            "unit": "batches" if self.shares_whole_batches else "samples",
            "by": type(inner).__name__ + (f"({words})" if words else ""),
            "seed": None if isinstance(inner, SequentialSampler) else self.seed,
        }

    def _order_of_epoch(self) -> Any:
        seed = derive_seed(self.seed, "order", self.epoch)
        self.order = seeded_order(self.sampler, seed, at_most=min(self._num_needed, self._stop))
        found = None if self._expected is None else self.fingerprint(self.num_consumed)
        if found not in (None, self._expected) and self.rank == 0:
            logger.warning(
                "the pass continues in another order than before the interruption, so some samples are repeated and "
                "others missed: %s keeps a state of its own; give it a set_epoch(epoch) that determines its order, "
                "or resume from a checkpoint of an epoch's end", type(self.sampler).__name__,
            )  # fmt: skip
        return self.order


class ShardedBatchSampler(IndexedShare):
    """Batches of one process: over all processes, each sample of the data set occurs exactly once, without padding.

    Args:
        sampler: gives the order of the whole data set; iterated with every generator seeded by (seed, epoch).
        batch_size: samples per batch and process.
        drop_last: drop the last global batch if it is short.
        training: all processes take the same number of steps. In a short last step, a process without a sample gets
            some of its step before, or rank zero's if that is its first step; :meth:`sizes_of` says that it has none.
        rank, world_size: of the share.
        seed: determines the order, together with the epoch.
    """

    yields_its_length = True
    batch_size: int
    drop_last: bool
    needs_whole_steps = False

    def __init__(
        self, sampler: Iterable[int], *, batch_size: int, drop_last: bool, rank: int, world_size: int, seed: int,
        training: bool = False,
    ) -> None:  # fmt: skip
        place = {"rank": rank, "world_size": world_size, "seed": seed}
        super().__init__(sampler, batch_size=batch_size, training=training, **place)
        self.drop_last = drop_last

    def position_after(self, num_batches: int) -> PassPosition:
        starts, stop = self._global_batches(self._length)
        if not 0 < num_batches <= len(starts):
            return self.num_consumed
        return starts[num_batches] if num_batches < len(starts) else stop  # the last batch may be shorter

    def sizes_of(self, number: int) -> Sequence[int | None] | None:
        size = min(self._length, self._stop) - self.num_consumed - number * self.stride
        return None if size >= self.stride else self.sizes_on_ranks(size)

    def first_uneven(self) -> int:
        if not tells_its_length(self.sampler):
            return 0  # known once the order is listed
        return max(0, min(len(self.sampler), self._stop) - self.num_consumed) // self.stride

    def end_after(self, num_samples: int) -> None:
        """End the pass after `num_samples` more samples of all processes; valid until the next epoch.

        Raises:
            ValueError: the pass would end within a step, which its data set does not allow.
        """
        if self.needs_whole_steps and num_samples % self.stride:
            raise ValueError(f"num_samples must be a multiple of the {self.stride} samples of a step for this data set")
        self._stop = self.num_consumed + num_samples

    @property
    def _length(self) -> int:
        """The number of samples that the sampler has yielded, or will yield if its ``__len__`` is right."""
        is_whole = 0 < len(self.order) < min(self._stop, self._num_needed)
        return len(self.order) if is_whole else max(len(self.order), len(self.sampler))

    @property
    def num_samples(self) -> int:
        return len(self.sampler) - (len(self.sampler) % self.stride if self.drop_last else 0)

    def __iter__(self) -> Iterator[list[int]]:
        order, shares = self._start_pass()
        for positions in shares:
            yield order[positions.start : positions.stop : positions.step]

    def places(self) -> Iterator[PlacedBatch]:
        """Yield the same batches, with the place of each sample in the epoch."""
        order, shares = self._start_pass()
        for positions in shares:
            yield PlacedBatch(self.epoch, positions, order[positions.start : positions.stop : positions.step])

    def __len__(self) -> int:
        starts, stop = self._global_batches(len(self.sampler))
        return len(starts) - (not self.training and len(starts) > 0 and stop - starts[-1] <= self.rank)

    def _start_pass(self) -> tuple[list[int], Iterator[range]]:
        """Return the order of the epoch, and the positions in it of each batch's samples."""
        self.order = order = self._order_of_epoch()
        is_cut = len(order) == self._stop  # listed up to the end of the pass only: the epoch has more
        starts, stop = self._global_batches(max(len(order), len(self.sampler)) if is_cut else len(order))
        batches = zip(starts, chain(starts[1:], (stop,)), strict=False)  # without starts, there is still a stop
        return order, filter(None, (self._share_of(range(*batch)) for batch in batches))

    def _share_of(self, positions: range) -> range:
        """Return this process's positions among those of a global batch."""
        if not self.training or len(positions) == self.stride:
            return positions[self.rank :: self.world_size]
        num_active_ranks = self.num_active_ranks(len(positions))
        if self.rank < num_active_ranks:
            return positions[self.rank :: num_active_ranks]
        of_first = positions[::num_active_ranks]
        if positions.start == self.num_consumed:
            return of_first
        # Of weight zero. Its own samples of the step before: those of others may lie in files that it has not opened.
        before = range(positions.start - self.stride + self.rank, positions.start, self.world_size)
        return before[: len(of_first)]

    def _global_batches(self, num_samples: int) -> tuple[range, int]:
        """Return the first position of each global batch, and the end of the last one."""
        if self.drop_last:
            num_samples -= (num_samples - self.num_consumed) % self.stride
        stop = min(num_samples, self._stop)
        return range(self.num_consumed, stop, self.stride), stop


class ShardedBatches(IndexedShare):
    """Every world_size-th batch of a custom batch sampler, whole.

    Args:
        batches: a batch sampler, which yields iterables of indices; or a sampler (``batch_size=None``), whose indices
            each give a batch of the data set. Iterated with every generator seeded by (seed, epoch).
        is_batch_sampler: whether `batches` is a batch sampler.
        training: all processes take the same number of steps. If the last batches are too few for all processes, the
            others get their own last one again, or rank zero's if that is their first step; :meth:`sizes_of` says that
            they have none.
        place: rank, world_size and seed, as in the base class.
    """

    def __init__(self, batches: Iterable[Any], *, is_batch_sampler: bool, training: bool, **place: Any) -> None:
        super().__init__(batches, batch_size=None, training=training, **place)
        self.is_batch_sampler = is_batch_sampler

    def sizes_of(self, number: int) -> Sequence[int | None]:
        first = self.num_consumed + number * self.world_size
        of_step = range(first, min(first + self.world_size, len(self.order)))
        sizes = [_length(self.order[each]) if self.is_batch_sampler else None for each in of_step]
        return sizes + [0] * (self.world_size - len(sizes))

    def __iter__(self) -> Iterator[Any]:
        self.order = batches = self._order_of_epoch()
        yield from (batches[number] for number in self._own(len(batches)))

    def places(self) -> Iterator[PlacedBatch | Place]:
        """Yield the same, with the place of each sample in the epoch."""
        self.order = batches = self._order_of_epoch()
        for number in self._own(len(batches)):
            batch = batches[number]
            if self.is_batch_sampler:
                indices, first = list(batch), number * _BATCH_STRIDE
                yield PlacedBatch(self.epoch, range(first, first + len(indices)), indices)
            else:
                yield Place(self.epoch, number, batch)  # even a list is one index

    def __len__(self) -> int:
        if self.training:
            return -((self.num_consumed - len(self.sampler)) // self.world_size)  # rounded up: all take the last step
        return len(self._own(len(self.sampler)))

    def _own(self, num_batches: int) -> list[int]:
        numbers = list(range(self.num_consumed + self.rank, num_batches, self.world_size))
        tail = (num_batches - self.num_consumed) % self.world_size
        if self.training and 0 < tail <= self.rank:
            numbers.append(numbers[-1] if numbers else self.num_consumed)  # of weight zero
        return numbers


class Places(Sampler[Any]):
    """A sampler that yields a share's batches as places."""

    def __init__(self, share: ShardedBatchSampler | ShardedBatches) -> None:
        self.share = share

    def __iter__(self) -> Iterator[Any]:
        return self.share.places()

    def __len__(self) -> int:
        return len(self.share)


def tells_its_length(sampler: Any) -> bool:
    """Return whether a sampler, or a data set with its own order, surely yields as many items as its length says.

    Of a long order only a part is listed, whose end is not that of the pass.
    """
    is_ours = isinstance(sampler, Dataset) or type(sampler).__module__.partition(".")[0] in ("torch", "runnerkit")
    return is_ours or (isinstance(sampler, Sized) and len(sampler) > _LONG)


def _innermost(sampler: Any) -> Any:
    """Return the sampler that draws: a BatchSampler holds it."""
    inner = SamplerMembers(sampler).sampler
    return sampler if inner is None else inner


def _checksum(indices: list[Any]) -> int | None:
    """Return a checksum of indices; None if they are of another kind than numbers and texts."""
    try:
        return crc32(json.dumps(indices, default=int).encode())
    except (TypeError, ValueError):
        return None


def _length(batch: Any) -> int | None:
    return len(batch) if isinstance(batch, Sized) else None


def seeded_order(sampler: Any, seed: int, *, at_most: int = sys.maxsize) -> list[Any]:
    """List what `sampler` yields when every generator it may draw from is seeded with `seed`, up to `at_most` items.

    The generators of the process and that of the sampler are restored.
    """
    generator = SamplerMembers(_innermost(sampler)).generator
    with keep_rng():
        seed_generators(seed)
        if not isinstance(generator, torch.Generator):
            return list(islice(sampler, at_most))
        state = generator.get_state()
        generator.manual_seed(seed)  # not with its own seed, which may differ between processes
        try:
            return list(islice(sampler, at_most))
        finally:
            generator.set_state(state)
