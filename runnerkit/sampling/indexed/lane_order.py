"""The order in which a job reads files: lanes, which processes and workers divide, so that each sample is read once.

The samples of all files, one file after another, are cut into lanes of equal length. Step k of the job takes its
samples in rotation from the lanes of turn k % turns. So a lane belongs to one process if the number of processes
divides the lanes of a turn. It also belongs to one data worker if the number of workers divides the turns, because
worker w of a DataLoader makes batches w, w + num_workers, and so on.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import gcd
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

from runnerkit.sampling.indexed.sampler import ShardedBatches, ShardedBatchSampler
from runnerkit.sampling.share import PassPosition
from runnerkit.seeding.generators import derive_seed

logger = logging.getLogger(__name__)

Ints: TypeAlias = NDArray[np.int64]
Run: TypeAlias = tuple[int, int, int]  # samples read together: file, and offsets of the first and behind the last
Spot: TypeAlias = tuple[int, int, Run]  # of a sample: lane, place in its run, run
_AHEAD = 8192  # positions that are computed at once
_TOGETHER = 16  # samples of a file that are read together if they are not shuffled
_MANY = 4  # blocks of a file; in fewer, a shorter one would leave its samples less shuffled


class _Spots(NamedTuple):
    """Spots in columns: a tuple for each of thousands would let Python look for garbage."""

    lanes: list[int]
    places: list[int]
    runs: list[Run]

    def part(self, start: int, stop: int) -> list[Spot]:
        """Return the spots from `start` up to, but not including, `stop`."""
        batch = slice(start, stop)
        return list(zip(self.lanes[batch], self.places[batch], self.runs[batch], strict=True))


class LaneOrder(Sequence[Spot]):
    """The order of an epoch as a sequence of spots that are computed when needed.

    Args:
        sizes: samples of each file.
        lanes: per turn.
        turns: after which the lanes of the first turn are read on.
        stride: samples in a step of the job; a multiple of `lanes`.
        shuffle: samples of a file that are read and shuffled together; the files are shuffled too. 0 keeps both orders.
        seed: of the epoch.

    Attributes:
        ahead: positions from one batch of a process to its next.
    """

    def __init__(self, sizes: Ints, *, lanes: int, turns: int, stride: int, shuffle: int, seed: int) -> None:
        self.num_samples = int(sizes.sum())
        self.lanes, self.turns, self.stride = lanes, turns, stride
        self.ahead = stride  # distance of the batches that are computed at once
        self.shuffle = shuffle
        self.seed = seed
        draw = np.random.default_rng(derive_seed(seed, "files"))
        self._files = draw.permutation(len(sizes)) if shuffle else np.arange(len(sizes))
        self._file_stops = np.cumsum(sizes[self._files])
        self._file_starts = self._file_stops - sizes[self._files]
        self._share = stride // lanes  # of a lane, in one step of its turn
        self._num_rounds = self.num_samples // (stride * turns)
        self._permutations: dict[int, tuple[int, Ints]] = {}  # by lane: the first sample of its last run, and the order
        self._single: dict[int, Spot] = {}
        self._spots = _Spots([], [], [])
        self._computed: dict[tuple[int, int, int], tuple[int, int]] = {}  # where in `_spots` those of a batch are

    def __len__(self) -> int:
        return self.num_samples

    @overload
    def __getitem__(self, place: int) -> Spot: ...
    @overload
    def __getitem__(self, place: slice) -> list[Spot]: ...
    def __getitem__(self, place: int | slice) -> Spot | list[Spot]:
        if isinstance(place, int):
            place = range(self.num_samples)[place]
            if place not in self._single:
                ahead = range(place, self.num_samples, self.ahead)[:_AHEAD]
                self._single = dict(zip(ahead, self._spots_at(np.asarray(ahead)).part(0, len(ahead)), strict=True))
            return self._single.pop(place)
        batch = place.indices(self.num_samples)
        where = self._computed.pop(batch, None)  # a pass asks for each batch once
        if where is None:
            if not range(*batch):
                return []
            self._compute(*batch)
            where = self._computed.pop(batch)
        return self._spots.part(*where)

    def _compute(self, start: int, stop: int, step: int) -> None:
        """Compute this batch and the following ones of the same process: each call of NumPy costs a microsecond."""
        size = len(range(start, stop, step))
        steps = [min(stop, self.num_samples)]
        while len(steps) * size < _AHEAD and steps[-1] + self.ahead <= self.num_samples:
            steps.append(steps[-1] + self.ahead)
        ranges = [(start + number * self.ahead, end, step) for number, end in enumerate(steps)]
        self._spots = self._spots_at(np.concatenate([np.arange(*each) for each in ranges]))
        ends = list(accumulate((len(range(*each)) for each in ranges), initial=0))
        self._computed = dict(zip(ranges, pairwise(ends), strict=True))

    def _spots_at(self, positions: Ints) -> _Spots:
        lane, number, low, high = self._places(positions)
        file = np.searchsorted(self._file_stops, number, side="right")
        together = min(self.shuffle or _TOGETHER, self.num_samples)
        start = self._file_starts[file]
        begin = np.maximum(start, low)  # of the lane's part of the file
        end = np.minimum(self._file_stops[file], high)
        # The blocks of different lanes begin at different steps: a process that read those of all its lanes at once
        # would stop for them, and for Python to look for garbage. A part of few blocks is not worth shorter ones.
        shift = np.where(end - begin >= _MANY * together, lane * together // (self.lanes * self.turns), 0)
        block = number - (number - begin + shift) % together
        first, last = np.maximum(block, begin), np.minimum(block + together, end)
        _, samples, run = np.unique(first, return_index=True, return_inverse=True)
        columns = (self._files[file], first - start, last - start)
        runs = list(zip(*(column[samples].tolist() for column in columns), strict=True))
        place = self._shuffled(lane, first, last, number, run) if self.shuffle else number - first
        return _Spots(lane.tolist(), place.tolist(), [runs[each] for each in run.tolist()])

    def _places(self, positions: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the lane of each position of the epoch, the number of its sample, and the lane's first and last one.

        The steps after the last whole round, which would leave lanes of unequal length, have short lanes of their own.
        """
        lanes, turns, share = self.lanes, self.turns, self._share
        step, within = np.divmod(positions, self.stride)
        place, column = np.divmod(within, lanes)
        lane = step % turns * lanes + column
        length = self._num_rounds * share
        low = lane * length
        number = low + step // turns * share + place
        high = low + length
        if positions[-1] >= self._num_rounds * turns * self.stride:
            begin = step * self.stride
            size, num_longer = np.divmod(np.minimum(self.stride, self.num_samples - begin), lanes)
            is_late = step >= self._num_rounds * turns
            low = np.where(is_late, begin + column * size + np.minimum(column, num_longer), low)
            number = np.where(is_late, low + place, number)
            high = np.where(is_late, low + size + (column < num_longer), high)
        return lane, number, low, high

    def _shuffled(self, lane: Ints, first: Ints, last: Ints, number: Ints, run: Ints) -> Ints:
        """Return the place of each sample in its run, which is shuffled and begins with sample `first` of the epoch."""
        by_run = np.argsort(run, kind="stable")
        place = (number - first)[by_run]
        ends = np.cumsum(np.bincount(run))
        owners = (column[by_run[ends - 1]].tolist() for column in (lane, first, last))
        for samples, *owner in zip(pairwise([0, *ends.tolist()]), *owners, strict=True):
            of_run = slice(*samples)
            place[of_run] = self._permutation(*owner)[place[of_run]]
        shuffled = np.empty_like(place)
        shuffled[by_run] = place
        return shuffled

    def _permutation(self, lane: int, begin: int, end: int) -> Ints:
        known = self._permutations.get(lane)
        if known is None or known[0] != begin:
            draw = np.random.default_rng((self.seed, begin))
            known = self._permutations[lane] = begin, draw.permutation(end - begin)
        return known[1]


class LaneBatchSampler(ShardedBatchSampler):
    """Batches of one process from a data set of files, in the order of its lanes.

    Args:
        dataset: has ``lane_order(stride=..., seed=...)``, which returns a :class:`LaneOrder`.
        key, num_workers: the loader's, for a warning.
        options: as in the base class.
    """

    def __init__(self, dataset: Any, *, key: str, num_workers: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.key, self.num_workers = key, num_workers
        self._order_stride = self.stride

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self._order_stride = self.stride

    def repeats_last(self) -> bool:
        """Return whether this process repeats its last batch, as the last step's samples belong to other processes.

        Reading others again would open a file.
        """
        last = len(self) - 1
        sizes = self.sizes_of(last) if self.training and last > 0 else None
        return sizes is not None and sizes[self.rank] == 0

    def unpacked(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _repeat_last(batches, len(self)) if self.repeats_last() else batches

    def _share_of(self, positions: range) -> range:
        if len(positions) < self.stride and self.repeats_last():
            return range(0)
        return super()._share_of(positions)

    def num_active_ranks(self, size: int) -> int:
        # A divisor of the processes, which usually divide the lanes: then each lane has one reader in this step too.
        most = super().num_active_ranks(size)
        return next(number for number in range(most, 0, -1) if self.world_size % number == 0)

    def position_after(self, num_batches: int) -> PassPosition:
        """Return how many samples all processes have consumed, and the step size that determines their order."""
        return [super().position_after(num_batches), self._order_stride]

    def skip(self, position: PassPosition) -> None:
        """Skip what was consumed before an interruption; the epoch keeps its order, whatever the step size is now."""
        self.num_consumed, self._order_stride = position

    def _order_of_epoch(self) -> LaneOrder:
        seed = derive_seed(self.seed, "order", self.epoch)
        order: LaneOrder = self.sampler.lane_order(stride=self._order_stride, seed=seed)
        order.ahead = self.stride
        num_readers = _num_readers(order.lanes, self.world_size) * _num_readers(order.turns, self.num_workers)
        _warn_of_repeated_reads(order, num_readers, self)
        return order


class LaneBatches(ShardedBatches):
    """Every world_size-th item of a data set of files whose items are batches, in the order of its lanes.

    Args:
        dataset, key, num_workers: as in :class:`LaneBatchSampler`.
        options: as in the base class.
    """

    def __init__(self, dataset: Any, *, key: str, num_workers: int, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.key, self.num_workers = key, num_workers

    def repeats_last(self) -> bool:
        """Return whether this process repeats its last item, as the last step's items belong to other processes."""
        num_left = len(self.sampler) - self.num_consumed
        return self.training and num_left > self.world_size and 0 < num_left % self.world_size <= self.rank

    def unpacked(self, batches: Iterator[Any]) -> Iterator[Any]:
        return _repeat_last(batches, len(self)) if self.repeats_last() else batches

    def _own(self, num_batches: int) -> list[int]:
        numbers = super()._own(num_batches)
        return numbers[:-1] if self.repeats_last() else numbers

    def _order_of_epoch(self) -> LaneOrder:
        order: LaneOrder = self.sampler.lane_order(stride=None, seed=derive_seed(self.seed, "order", self.epoch))
        order.ahead = self.world_size
        num_readers = _num_readers(order.lanes, self.world_size * max(1, self.num_workers))
        _warn_of_repeated_reads(order, num_readers, self)
        return order


def _repeat_last(batches: Iterator[Any], length: int) -> Iterator[Any]:
    batch = kept = None
    for number, batch in enumerate(batches, start=2):
        if number == length:
            kept = copy.deepcopy(batch)  # `handle_batch` may modify it
        yield batch
    yield batch if kept is None else kept


def _num_readers(num_parts: int, num_takers: int) -> int:
    """Return how many of the processes, or workers, read each part, if they take its samples in turns."""
    return max(1, num_takers) // gcd(num_parts, max(1, num_takers))


def _warn_of_repeated_reads(order: LaneOrder, num_readers: int, share: LaneBatchSampler | LaneBatches) -> None:
    if num_readers > 1 and share.rank == 0 and share.epoch <= 1:
        logger.warning(
            "loader %r: its data set has %d lanes x %d turns, which %d processes with %d workers cannot divide, so "
            "each file is read %d times; pass lanes=(a multiple of the processes, a multiple of the workers)",
            share.key, order.lanes, order.turns, share.world_size, share.num_workers, num_readers,
        )  # fmt: skip
