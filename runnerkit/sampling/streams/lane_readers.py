"""The readers of a stream's lanes, each of which is a process or one of its workers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple, Protocol

import numpy as np

from runnerkit.sampling.seeded_dataset import seed_collate
from runnerkit.sampling.streams.shards import Shards, can_seek
from runnerkit.seeding.generators import GENERATORS, SEED_STRIDE, CPUState, derive_seed
from runnerkit.support.iterators import started
from runnerkit.support.torch_internals import without_worker_info

_SAMPLES_PER_STATE = 1000  # of a shard that can seek; at most as many are read again in a resumed run
_END = object()


class Lanes(Protocol):
    """The lanes of a :class:`LaneStream`, as its readers see them."""

    shards: Shards
    lanes: int
    turns: int
    samples_per_lane: int
    endless: bool
    seed: int
    key: str
    collate_fn: Callable[[Any], Any]

    def shards_of_lane(self, lane: int, *, epoch: int, lap: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the numbers of a lane's shards, in the order in which a pass reads them."""
        ...


class LanePlace(NamedTuple):
    """Place of a lane: it has yielded `num_samples`; after `first` of them, shard `number` of pass `lap` had `state`.

    None is the state at its beginning.
    """

    num_samples: int = 0
    lap: int = 0
    number: int = 0
    first: int = 0
    state: Any = None


class LaneStart(NamedTuple):
    """The start of a pass: epoch, turn of its first step, place of each lane."""

    epoch: int
    turn: int
    places: list[LanePlace]


class LaneReaders:
    """The open lanes of one reader, which is a process or one of its workers.

    If reading a part moves a generator that has not been seeded for it, the part is read again from its shards, and
    from then on that generator is seeded before each sample, by the sample's place in its lane.
    """

    def __init__(self, stream: Lanes, start: LaneStart, *, in_worker: bool) -> None:
        self.stream, self.start, self.in_worker = stream, start, in_worker
        self.lanes: dict[int, _Lane] = {}
        self.drawn_from: set[str] = set()

    def part(self, lanes: list[int]) -> tuple[list[Any], list[list[Any]]]:
        """Read this reader's samples of one step: one of each lane, in the order of the lanes."""
        if not self.in_worker:
            return self._drawn(lanes), self._opened(lanes)
        with without_worker_info():  # a shard that splits itself by worker would yield only a part
            samples = self._drawn(lanes)
        if samples:
            stream = self.stream
            # A number that no other batch of the epoch has, also after some lanes have ended.
            num_samples = max(self.lanes[lane].num_samples for lane in lanes)
            first = num_samples * stream.lanes * stream.turns + lanes[0]
            seed_collate(stream.collate_fn, seed=stream.seed, epoch=self.start.epoch, position=first)
        return samples, self._opened(lanes)

    def has_ended(self, lane: int) -> bool:
        """Return whether all samples of a lane were read."""
        return lane in self.lanes and self.lanes[lane].has_ended

    def _opened(self, lanes: list[int]) -> list[list[Any]]:
        moved_on = [number for number in lanes if self.lanes[number].has_moved_on]
        for number in moved_on:
            self.lanes[number].has_moved_on = False
        return [[number, *self.lanes[number].place[1:]] for number in moved_on]

    def _drawn(self, lanes: list[int]) -> list[Any]:
        stream = self.stream
        if stream.shards.draws_nothing:
            return self._read(lanes, seeded=())
        before, places = CPUState(), [self._lane(lane).place for lane in lanes]
        samples = self._read(lanes, seeded=self.drawn_from)
        while moved := before.moved(apart_from=self.drawn_from):
            self.drawn_from |= moved
            for lane, place in zip(lanes, places, strict=True):
                self.lanes[lane] = _Lane(stream, lane, place, epoch=self.start.epoch)
            samples = self._read(lanes, seeded=self.drawn_from)
        if not self.in_worker:  # the model uses these generators too
            before.restore(self.drawn_from)
        return samples

    def _lane(self, lane: int) -> _Lane:
        if lane not in self.lanes:
            self.lanes[lane] = _Lane(self.stream, lane, self.start.places[lane], epoch=self.start.epoch)
        return self.lanes[lane]

    def _read(self, lanes: list[int], *, seeded: Any) -> list[Any]:
        seeders = [GENERATORS[name] for name in seeded]
        num_samples = self.stream.samples_per_lane
        rows = [(self.lanes.get(lane) or self._lane(lane)).take(num_samples, seeders) for lane in lanes]
        if len(rows) == 1:
            return rows[0]
        if all(len(row) == num_samples for row in rows):
            return [sample for samples in zip(*rows, strict=True) for sample in samples]
        return [row[number] for number in range(num_samples) for row in rows if number < len(row)]


class _Lane:
    """The shards of a lane, one after another.

    Attributes:
        num_samples, lap, number, first, state: as in :class:`LanePlace`.
        has_ended: whether no sample is left.
        has_moved_on: whether a shard was opened, or has a state, that the process does not know of.
    """

    def __init__(self, stream: Lanes, lane: int, place: LanePlace, *, epoch: int) -> None:
        self.stream, self.lane, self.epoch = stream, lane, epoch
        self.num_samples, self.lap, self.number, self.first, self.state = place
        self.has_ended = self.has_moved_on = False
        self._seed = derive_seed(stream.seed, "sample", epoch, lane)
        self._shards = stream.shards_of_lane(lane, epoch=epoch, lap=self.lap)
        self._samples: Iterator[Any] | None = None
        self._seekable: Any = None  # the open shard, if it can seek
        self._lap_first = 0  # samples before this pass over its shards, if it began here

    @property
    def place(self) -> LanePlace:
        """The place after the samples that were read."""
        return LanePlace(self.num_samples, self.lap, self.number, self.first, self.state)

    def take(self, num_samples: int, seeders: list[Callable[[int], object]]) -> list[Any]:
        """Read the next samples, fewer only at the lane's end."""
        if self._samples is None:
            self._open(seeders)
        samples = self._read_samples(num_samples, seeders)
        while len(samples) < num_samples and not self.has_ended:
            self._open_next(seeders)
            samples += self._read_samples(num_samples - len(samples), seeders)
        if self._seekable is not None and self.num_samples - self.first >= _SAMPLES_PER_STATE and not self.has_ended:
            # A copy, as the shard may modify what it returned or loaded.
            state = copy.deepcopy(self._seekable.state_dict())
            self.first, self.state, self.has_moved_on = self.num_samples, state, True
        return samples

    def _read_samples(self, num_samples: int, seeders: list[Callable[[int], object]]) -> list[Any]:
        """Read samples of the open shard, seeding the generators before each."""
        assert self._samples is not None
        if seeders:
            samples = list(islice(self._seeded(seeders), num_samples))
        else:
            samples = list(islice(self._samples, num_samples))
        self.num_samples += len(samples)
        return samples

    def _seeded(self, seeders: list[Callable[[int], object]]) -> Iterator[Any]:
        assert self._samples is not None
        for number in count(self.num_samples):
            for seed in seeders:
                seed(self._seed + SEED_STRIDE * number)
            sample = next(self._samples, _END)
            if sample is _END:
                return
            yield sample

    def _open(self, seeders: list[Callable[[int], object]]) -> None:
        """Open the shard of the lane's place, and read the samples again that were taken from it."""
        num_taken, self.num_samples = self.num_samples - self.first, self.first
        self._iterate_shard(seeders)
        self._read_samples(num_taken, seeders)

    def _open_next(self, seeders: list[Callable[[int], object]]) -> None:
        """Open the shard after the current one; in evaluation, the lane ends with its last."""
        if self.number + 1 < len(self._shards):
            self.number += 1
        elif self.stream.endless:
            self._check_not_empty()
            self.lap, self.number, self._lap_first = self.lap + 1, 0, self.num_samples
            self._shards = self.stream.shards_of_lane(self.lane, epoch=self.epoch, lap=self.lap)
        else:
            self.has_ended = True
            return
        self.first, self.state, self.has_moved_on = self.num_samples, None, True
        self._iterate_shard(seeders)

    def _iterate_shard(self, seeders: list[Callable[[int], object]]) -> None:
        for seed in seeders:
            seed(self._seed + SEED_STRIDE * self.first)
        # A shard that is read again within an epoch shuffles as in a later one.
        index, epoch = int(self._shards[self.number]), self.epoch + self.lap
        shard = self.stream.shards.open(index, epoch=epoch, seed=self.stream.seed)
        self._seekable = shard if can_seek(shard) else None
        if self.state is not None:
            self._seekable.load_state_dict(copy.deepcopy(self.state))
        self._samples = started(shard)

    def _check_not_empty(self) -> None:
        if self.num_samples == self._lap_first:  # it would be read for ever, with the same draws
            raise ValueError(
                f"loader {self.stream.key!r}: the {len(self._shards)} shards of lane {self.lane} of "
                f"{self.stream.lanes * self.stream.turns} are empty; set dataset.lanes to fewer lanes"
            )
