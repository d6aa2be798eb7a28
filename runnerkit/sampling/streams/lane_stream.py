"""A process's share of a stream of shards; all processes together read each shard once.

The shards are dealt to lanes, and step k of the job takes its samples in rotation from the lanes of turn k % turns, as
in :mod:`runnerkit.sampling.indexed.lane_order`. The number of samples in a shard is not known in advance, so lanes end
at different times. An endless stream starts a lane again, in another order. Otherwise a lane that has ended leaves its
places in the batches empty. Neither takes an agreement between processes, except in a training that is not endless:
there all processes take a step if one of them has samples for it, and sum the sizes of each step while the one before
runs.
"""

from __future__ import annotations

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from runnerkit.sampling.epochs import set_epoch
from runnerkit.sampling.lanes import can_divide
from runnerkit.sampling.orders import Order
from runnerkit.sampling.share import DividedShare, PassPosition
from runnerkit.sampling.streams.lane_readers import LanePlace, LaneReaders, LaneStart
from runnerkit.sampling.streams.shards import Shards
from runnerkit.seeding.generators import derive_seed, keep_cpu_rng, seed_generators
from runnerkit.support.torch_internals import pinned

_KEPT_PLACES = 64  # per lane; more shards than this in batches that are prefetched would be read again
_KEPT_STEPS = 64  # a loader may fetch as many ahead


class Part(NamedTuple):
    """Samples of a process in step `number` of a pass, or their batch; and where shards can be opened again for it."""

    content: Any
    size: int
    number: int
    opened: list[list[Any]]

    def pin_memory(self) -> Part:
        """Pin the batch; called by a loader with ``pin_memory``."""
        return self._replace(content=pinned(self.content))


class LaneStream(DividedShare, IterableDataset[Any]):
    """Batches of one process from its lanes of a stream.

    Args:
        shards: of the stream.
        lanes, turns: lanes in each turn, and turns; a multiple of the processes, and of the workers.
        are_default: whether a resumed pass keeps the lanes that it was saved with, if they can be divided too.
        num_workers: the loader's.
        batch_size: samples per batch and process; None if the stream yields batches, which are distributed whole.
        training: whether lanes read their shards in random order, and all processes need the same number of batches.
        endless: whether a lane that has ended starts again.
        rank, world_size: of the share.
        seed: determines the order and random numbers, together with the epoch.
        key: the loader's, for messages.
        collate_fn: the loader's.

    Attributes:
        start_sum: starts to sum a tensor over processes and returns a function that waits for it, so that all processes
            take the same number of steps; without it, each yields its own batches.
    """

    def __init__(
        self, shards: Shards, *, lanes: int, turns: int, batch_size: int | None, training: bool, endless: bool,
        rank: int, world_size: int, seed: int, key: str, collate_fn: Callable[[Any], Any],
        are_default: bool = False, num_workers: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(batch_size=batch_size, training=training, rank=rank, world_size=world_size, seed=seed)
        self.shards = shards
        self.are_default, self.num_workers = are_default, num_workers
        self.endless, self.key, self.collate_fn = endless, key, collate_fn
        self._take_lanes(lanes, turns)
        # Epoch; samples consumed before it resumed. Persistent workers read them.
        self._shared = torch.zeros(2, dtype=torch.int64).share_memory_()
        self._start = self._beginning(0)
        self._ahead: dict[int, deque[LanePlace]] = {}
        # By batch, as a loader may be ahead of the run.
        self._sizes: dict[int, list[int]] = {}  # samples of each rank
        self._num_empty: dict[int, int] = {}  # steps before it that are empty, if there are any
        self.start_sum: Callable[[torch.Tensor], Callable[[], torch.Tensor]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "start_sum": None}  # workers do not sum

    def _take_lanes(self, lanes: int, turns: int) -> None:
        if self.batch_size is None:  # item n belongs to lane n % (lanes * turns), whatever the number of processes
            lanes, turns = self.world_size, lanes * turns // self.world_size
        self.lanes, self.turns = lanes, turns
        self.samples_per_lane = self.stride // lanes  # in a step

    def set_epoch(self, epoch: int) -> None:
        self._shared.copy_(torch.tensor([epoch, 0]))
        self._start, self.num_consumed = self._beginning(epoch), 0
        self._ahead, self._sizes, self._num_empty = {}, {}, {}

    def position_after(self, num_batches: int) -> dict[str, Any]:
        """Return the place of each lane after `num_batches`; None for other processes' lanes, which are unknown."""
        num_steps = num_batches + self._num_empty.get(num_batches - 1, 0)
        places = [
            list(self._place_after(num_steps, lane)) if lane % self.world_size == self.rank else None
            for lane in range(self.lanes * self.turns)
        ]
        return {
            "epoch": self._start.epoch,
            "num_consumed": self.num_consumed + num_batches * self.stride,
            # Of whole batches, the lane of the next one, as the lanes of a turn depend on the number of processes.
            "turn": (self._start.turn + num_steps) % self.turns * (1 if self.batch_size is not None else self.lanes),
            "lanes": self._layout,
            "places": places,
        }

    def described(self) -> Order:
        return {"length": self.shards.num_shards, "unit": "shards", "by": type(self.shards).__name__, "seed": None}

    @property
    def full_size(self) -> int | None:
        return self.batch_size if self.endless or self.world_size > 1 else None

    def use_sum(self, start_sum: Callable[[torch.Tensor], Callable[[], torch.Tensor]]) -> None:
        self.start_sum = start_sum

    def sizes_of(self, number: int) -> list[int | None] | None:
        sizes = self._sizes.get(number, [1 if self.batch_size is None else self.batch_size] * self.world_size)
        if self.batch_size is None:
            return [None if size else 0 for size in sizes]
        return None if all(size == self.batch_size for size in sizes) else [*sizes]

    def first_uneven(self) -> int:
        return sys.maxsize if self.batch_size is not None and self.endless else 0

    def joined(self, position: PassPosition, gather: Callable[[Any], list[Any]]) -> PassPosition:
        """Return the position of the job from all processes' positions: each knows the shards of its own lanes."""
        positions = gather(position)
        places = [positions[lane % self.world_size]["places"][lane] for lane in range(self.lanes * self.turns)]
        return {**positions[0], "places": places}

    def skip(self, position: PassPosition) -> None:
        """Continue at a position, with any number of processes and any batch size.

        Raises:
            ValueError: the position is that of a stream with other lanes, which were set or cannot be divided, or
                that of a stream without lanes.
        """
        if not isinstance(position, dict):
            raise ValueError(
                f"loader {self.key!r}: its position was saved before its stream was divided into lanes; set "
                "dataset.lanes = (1, 1), the stream's own order, to continue"
            )
        saved = position["lanes"]
        if saved != self._layout:
            job: dict[str, Any] = {"world_size": self.world_size, "num_workers": self.num_workers}
            stride = None if self.batch_size is None else self.stride
            if not self.are_default or not can_divide(*saved, stride=stride, **job):
                raise ValueError(
                    f"loader {self.key!r}: its position was saved with lanes={tuple(saved)}, and now it has "
                    f"lanes={tuple(self._layout)}; set dataset.lanes, or batch_size x processes, as before"
                )
            self._take_lanes(*saved)
        places, turn = [LanePlace(*place) for place in position["places"]], position["turn"]
        if self.batch_size is None:  # the lane of the next batch
            if turn % self.lanes:
                raise ValueError(
                    f"loader {self.key!r}: it was interrupted after a number of batches that {self.world_size} "
                    "processes cannot continue; resume with as many processes as before"
                )
            turn //= self.lanes
        self._start = LaneStart(position["epoch"], turn, places)
        self.num_consumed = position["num_consumed"]  # or what it would be with full batches
        self._shared.copy_(torch.tensor([position["epoch"], self.num_consumed]))
        self.needs_new_workers = True

    def unpacked(self, batches: Iterator[Part]) -> Iterator[Any]:
        """Yield the batches of parts from :meth:`__iter__`, and note which shards were opened for them."""
        parts = self._without_gaps(batches)
        if self.start_sum is not None and self.training and not self.endless:
            yield from self._in_step(parts, self.start_sum)
            return
        number = num_empty = 0
        for part in parts:
            if part.size:
                self._note(number, num_empty)
                number += 1
                yield part.content
            else:
                num_empty += 1

    def _note(self, number: int, num_empty: int) -> None:
        if num_empty:
            self._num_empty[number] = num_empty
            self._num_empty.pop(number - _KEPT_STEPS, None)

    def _without_gaps(self, parts: Iterator[Part]) -> Iterator[Part]:
        """Yield a part for each step, empty ones for the steps of workers that have ended."""
        number = 0
        for part in parts:
            while number < part.number:
                yield Part(None, 0, number, [])
                number += 1
            number += 1
            for lane, *place in part.opened:
                self._ahead.setdefault(lane, deque(maxlen=_KEPT_PLACES)).append(LanePlace(0, *place))
            yield part

    def _in_step(self, parts: Iterator[Part], start_sum: Callable[[torch.Tensor], Any]) -> Iterator[Any]:
        """Yield a batch for each step in which any process has samples; a placeholder if this process has none."""
        placeholder, number, num_empty = None, 0, 0
        part, sizes_there = self._next(parts, start_sum)
        while max(sizes := sizes_there().tolist()) >= 0:
            following = self._next(parts, start_sum)  # while this step runs, the sizes of the next one are summed
            if max(sizes) == 0:
                num_empty += 1
            else:
                self._note(number, num_empty)
                self._sizes[number] = [max(0, size) for size in sizes]
                self._sizes.pop(number - _KEPT_STEPS, None)
                number += 1
                if part is not None and part.size:
                    yield part.content
                else:
                    placeholder = placeholder or [self._placeholder_batch()]
                    yield copy.deepcopy(placeholder[0])  # `handle_batch` may modify it
            part, sizes_there = following

    def _placeholder_batch(self) -> Any:
        """Return a full batch of this process's first samples, or of another process's if this one has none."""
        epoch = self._start.epoch
        with keep_cpu_rng():
            seed_generators(derive_seed(self.seed, "stand-in", epoch))
            lanes = sorted(range(self.lanes * self.turns), key=lambda lane: lane % self.world_size != self.rank)
            for index in chain.from_iterable(self.shards_of_lane(lane, epoch=epoch, lap=0) for lane in lanes):
                shard = self.shards.open(int(index), epoch=epoch, seed=self.seed)
                samples = list(islice(shard, self.batch_size or 1))
                if samples:
                    full = list(islice(cycle(samples), self.batch_size or 1))
                    return self.collate_fn(full[0] if self.batch_size is None else full)
        raise ValueError(f"loader {self.key!r}: its shards had samples, and now they are empty")

    def _next(self, parts: Iterator[Part], start_sum: Callable[[torch.Tensor], Any]) -> tuple[Part | None, Any]:
        """Fetch a part, and start to tell all processes its size; -1 if there is none."""
        part = next(parts, None)
        sizes = torch.zeros(self.world_size, dtype=torch.int64)
        sizes[self.rank] = -1 if part is None else part.size
        return part, start_sum(sizes)

    def __iter__(self) -> Iterator[Any]:
        """Yield a part for each step of this reader; without workers, it is the only one."""
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        epoch, num_consumed = self._shared.tolist()
        start = self._start
        if info is not None:
            set_epoch(epoch, self.shards, self.collate_fn)  # a persistent worker has those of the first epoch
        if (start.epoch, self.num_consumed) != (epoch, num_consumed):  # a persistent worker was made for another pass
            start = self._beginning(epoch)
        readers = LaneReaders(self, start, in_worker=info is not None)
        # A DataLoader takes batches from its workers in rotation, so this one makes steps `worker`, + num_workers, ...
        turns = [(start.turn + worker + number * num_workers) % self.turns for number in range(self.turns)]
        own = [
            [turn * self.lanes + column for column in range(self.rank, self.lanes, self.world_size)]
            for turn in dict.fromkeys(turns)
        ]
        number = worker
        while not all(readers.has_ended(lane) for lanes in own for lane in lanes):
            for lanes in own:
                samples, opened = readers.part(lanes)
                yield Part(samples, len(samples), number, opened)
                number += num_workers

    def collate(self, part: Part) -> Part:
        """Collate the samples of a part; the loader's ``collate_fn``."""
        samples, size, number, opened = part
        content = None
        if size:
            content = self.collate_fn(samples[0] if self.batch_size is None else samples)
        return Part(content, size, number, opened)

    def shards_of_lane(self, lane: int, *, epoch: int, lap: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the numbers of a lane's shards, in the order in which a pass reads them."""
        own = np.arange(lane, self.shards.num_shards, self.lanes * self.turns)
        if not self.training:
            return own
        return np.random.default_rng(derive_seed(self.seed, "shards", epoch, lap, lane)).permutation(own)

    @property
    def _layout(self) -> list[int]:
        """The lanes as a position names them: those of whole batches do not depend on the number of processes."""
        return [self.lanes, self.turns] if self.batch_size is not None else [1, self.lanes * self.turns]

    def _beginning(self, epoch: int) -> LaneStart:
        return LaneStart(epoch, 0, [LanePlace()] * (self.lanes * self.turns))

    def _place_after(self, num_steps: int, lane: int) -> LanePlace:
        start = self._start.places[lane]
        delay = (lane // self.lanes - self._start.turn) % self.turns  # steps until its turn
        num_samples = start.num_samples + self.samples_per_lane * max(0, -((delay - num_steps) // self.turns))
        # Workers read ahead of the run: the shard of its next sample is the last one that begins at or before that.
        known = [place for place in self._ahead.get(lane, ()) if place.first <= num_samples]
        return (known[-1] if known else start)._replace(num_samples=num_samples)
