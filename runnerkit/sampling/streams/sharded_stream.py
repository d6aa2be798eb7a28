"""A process's exact share of an IterableDataset."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, count, islice
from typing import Any, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from runnerkit.sampling.epochs import set_epoch
from runnerkit.sampling.seeded_dataset import draws_nothing, seed_collate
from runnerkit.sampling.share import DividedShare, PassPosition
from runnerkit.sampling.streams.heads import NUM_SAMPLES, StreamHead, compare
from runnerkit.seeding.generators import (
    GENERATORS,
    CPUState,
    derive_seed,
    keep_cpu_rng,
    python_and_numpy_mark,
    seed_generators,
)
from runnerkit.support.iterators import started
from runnerkit.support.torch_internals import pinned, without_worker_info

_torch = torch.default_generator
_NUM_WATCHED = 64  # samples that are read with all generators of their own, to see which are used


# Samples of one step that a process keeps: the first ones and its own part, and the number of all processes'. A plain
# tuple, since a step makes one.
Chunk = tuple[list[Any], list[Any], int]


class Tail(NamedTuple):
    """Samples of a process in a short last step, or their batch, and the sizes of all ranks."""

    content: Any
    sizes: Sequence[int | None]

    def pin_memory(self) -> Tail:
        """Pin the batch; called by a loader with ``pin_memory``."""
        return Tail(pinned(self.content), self.sizes)


class ShardedStream(DividedShare, IterableDataset[Any]):
    """Batches of one process, as lists of samples, from a stream that each process and each worker reads whole.

    Sample i of the stream belongs to the process and the batch that sample i of a map-style data set would belong to.
    Samples of other processes and workers are read and discarded, so the stream should yield cheap items (a line, a
    record, a reference); expensive work such as decoding belongs in ``collate_fn``, which gets this worker's samples
    only. Its generators are seeded by (seed, epoch) when it starts, and it has them to itself, so a stream shuffles
    identically everywhere.

    Args:
        dataset: must be the same stream in every process. ``get_worker_info()`` returns None while it is read,
            as in a process without workers. If it declares ``draws_nothing = True``, generators are not looked after.
        batch_size: samples per batch and process; None if the stream yields batches, which are distributed whole.
        drop_last: drop the last global batch if it is short.
        training: all processes get the same number of batches. In a short last step, processes without a sample get
            those of rank zero, and :meth:`sizes_of` says that they have none.
        rank, world_size: of the share.
        seed: determines the random numbers, together with the epoch.
        key: the loader's, for messages.
        collate_fn: the loader's; persistent workers call its ``set_epoch``.
        num_workers: the loader's.
    """

    drop_last: bool

    def __init__(
        self, dataset: Any, *, batch_size: int | None, drop_last: bool, training: bool,
        rank: int, world_size: int, seed: int, key: str, collate_fn: Any = None, num_workers: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(batch_size=batch_size, training=training, rank=rank, world_size=world_size, seed=seed)
        self.dataset = dataset
        self.drop_last = drop_last
        self.key = key
        self.collate_fn = collate_fn
        self._start = torch.zeros(2, dtype=torch.int64).share_memory_()  # epoch; samples consumed before it resumed
        self._worker: tuple[int, int] | None = None
        self._draws_nothing = draws_nothing(dataset)
        # Generators that the stream draws from, beside torch's, which is exchanged in any case.
        self._drawn_from = set[str]()
        self._inside: CPUState  # their states between its chunks
        self._outside: CPUState  # their states before a chunk, with its mark
        self._mark: Any = None
        self._first_read = StreamHead(num_workers)
        self.head = self._first_read if world_size * max(1, num_workers) > 1 else None
        self._sizes: dict[int, Sequence[int | None]] = {}  # of the last step, by its number

    def set_epoch(self, epoch: int) -> None:
        self._start.copy_(torch.tensor([epoch, 0]))
        self.num_consumed, self._sizes = 0, {}
        self._first_read.fingerprints.zero_()  # a pass that was resumed at its end has recorded other samples

    def sizes_of(self, number: int) -> Sequence[int | None] | None:
        """Return the samples of each rank in a step whose batch was yielded, as :class:`LoaderShare` says."""
        return self._sizes.get(number, None if self.batch_size is not None else [None] * self.world_size)

    @property
    def full_size(self) -> int | None:
        return self.batch_size if self.knows_tail else None

    def skip(self, position: PassPosition) -> None:
        """Skip what was consumed before an interruption: it is read again and discarded.

        Raises:
            ValueError: the position is that of a stream with lanes.
        """
        if isinstance(position, dict):
            saved = tuple(position["lanes"])
            raise ValueError(
                f"loader {self.key!r}: its position was saved with lanes={saved}, but now its stream is not divided; "
                "resume with processes and workers that divide the lanes, and with lanes and drop_last as before"
            )
        self._start[1] = self.num_consumed = position[0] if isinstance(position, list) else position  # 0.1 saved a list

    @property
    def num_samples(self) -> int:
        """Samples of an epoch, of all processes; TypeError if the stream does not have a length."""
        return len(self.dataset) - (len(self.dataset) % self.stride if self.drop_last else 0)

    def __len__(self) -> int:
        """Return the number of this process's batches; TypeError if the stream does not have a length."""
        num_whole, tail = divmod(max(0, len(self.dataset) - self.num_consumed), self.stride)
        return num_whole + (not self.drop_last and tail > (0 if self.training else self.rank))

    def __iter__(self) -> Iterator[Any]:
        """Yield this process's part of each chunk of ``batch_size * world_size`` samples; a worker yields its share."""
        worker, num_workers = self._enter_worker()
        samples = self._samples()
        for number in count():
            (first, part, size), samples = self._read(samples, number * self.stride)
            is_whole, sizes = size == self.stride, None
            if not is_whole and self.knows_tail:
                part, sizes = self._tail(first, part, size)
            if part and number % num_workers == worker and (is_whole or not self.drop_last):
                if self._worker is not None:
                    self._seed_collate(number)
                content = part if self.batch_size is not None else part[0]
                yield content if sizes is None else Tail(content, sizes)
            if not is_whole:
                return

    def collate(self, samples: Any) -> Any:
        """Collate samples, with the sizes of all ranks in a short last step; the ``collate_fn`` if `knows_tail`."""
        if type(samples) is Tail:
            return Tail(self.collate_fn(samples.content), samples.sizes)
        return self.collate_fn(samples)

    def unpacked(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Return the batches, and note the sizes of the last step."""
        return self._noted(batches) if self.knows_tail else batches

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if type(batch) is Tail:
                self._sizes[number] = batch.sizes
                yield batch.content
            else:
                yield batch

    @property
    def knows_tail(self) -> bool:
        """True if the sizes of all ranks are known: processes without a sample take part in a short last step."""
        return self.training and self.world_size > 1 and not self.drop_last

    def _seed_collate(self, number: int) -> None:
        epoch, num_consumed = self._start.tolist()
        position = num_consumed + number * self.stride + self.rank
        seed_collate(self.collate_fn, seed=self.seed, epoch=epoch, position=position)

    def _tail(self, first: list[Any], part: list[Any], size: int) -> tuple[list[Any], Sequence[int | None] | None]:
        """Return this process's part of a short last step, and the sizes of all ranks."""
        if self.batch_size is None or size == 0:
            return part or first[:1], [*[None] * size, *[0] * (self.world_size - size)]
        num_active_ranks = self.num_active_ranks(size)
        if num_active_ranks < self.world_size:
            part = first[self.rank if self.rank < num_active_ranks else 0 :: num_active_ranks]
        return part, self.sizes_on_ranks(size)

    def _read(self, samples: Iterator[Any], begin: int) -> tuple[Chunk, Iterator[Any]]:
        """Read one chunk, after `begin` samples of this pass, with the generators as the stream left them.

        Only the generators from which the first samples draw are exchanged. If it draws from another one later,
        it is read again from its start; one that continues instead keeps what it drew.

        Returns:
            The chunk, and the samples behind it.
        """
        if self._draws_nothing:
            return self._chunk(samples), samples
        if begin < _NUM_WATCHED:
            return self._watched(samples), samples
        if (mark := python_and_numpy_mark()) != self._mark:  # seldom: few models draw from these
            self._mark, self._outside = mark, CPUState()
        outside, inside, drawn_from = self._outside, self._inside, self._drawn_from
        outside.torch = _torch.get_state()
        _torch.set_state(inside.torch)
        if drawn_from:
            inside.restore(drawn_from)
            mark = python_and_numpy_mark()
        chunk = self._chunk(samples)
        inside.torch = _torch.get_state()
        _torch.set_state(outside.torch)
        left = python_and_numpy_mark()
        if left != mark:
            moved = {name for name, one, other in zip(("python", "numpy"), mark, left, strict=True) if one != other}
            if not moved <= drawn_from:
                self._drawn_from |= moved
                chunk, samples = self._read_again(begin, chunk)
                outside.restore()
                return chunk, samples
            inside.read(moved)
        if drawn_from:
            outside.restore(drawn_from)
        return chunk, samples

    def _watched(self, samples: Iterator[Any]) -> Chunk:
        """Read a chunk with all generators of its own, and note which it draws from."""
        outside, inside = CPUState(), self._inside
        inside.restore()
        chunk = self._chunk(samples)
        self._drawn_from |= inside.moved(apart_from={"torch"})
        inside.read(GENERATORS)
        outside.restore()
        return chunk

    def _read_again(self, begin: int, chunk: Chunk) -> tuple[Chunk, Iterator[Any]]:
        """Read the chunk after `begin` samples from the start of the stream, with all generators of its own.

        Args:
            chunk: what was read, which is returned if the stream cannot start again.
        """
        last, samples, head = self._inside, self._begin(), StreamHead(1)
        self._inside.restore()
        worker = 0 if self._worker is None else self._worker[0]
        with self._no_worker():
            first = list(islice(samples, NUM_SAMPLES))
            for position, sample in enumerate(first):
                head.note(0, position, sample)
            if compare([self._first_read.read()[worker, None], head.read()]) == "different":
                self._inside.read(GENERATORS)
                self._inside.torch = last.torch
                return chunk, chain(first, samples)
            rest = begin + int(self._start[1]) - len(first)
            next(islice(samples, rest, rest), None)  # skips them
        chunk = self._chunk(samples)
        self._drawn_from |= self._inside.moved(apart_from={"torch"})
        self._inside.read(GENERATORS)
        return chunk, samples

    def _chunk(self, samples: Iterator[Any]) -> Chunk:
        if self._worker is None:  # a context manager that does nothing would cost three calls
            return self._next_chunk(samples)
        with without_worker_info():
            return self._next_chunk(samples)

    def _next_chunk(self, samples: Iterator[Any]) -> Chunk:
        if self.world_size == 1:
            part = list(islice(samples, self.stride))
            return part[:2], part, len(part)
        first, part, size = [], [], 0
        for offset, sample in enumerate(islice(samples, self.stride)):
            size += 1
            if offset < 2 * self.world_size:  # all samples of a last step that fewer ranks share, two each
                first.append(sample)
            if offset % self.world_size == self.rank:
                part.append(sample)
        return first, part, size

    def _samples(self) -> Iterator[Any]:
        """Start to read the stream, with generators of its own, and skip what was consumed before."""
        samples = self._begin()
        # Reads the rest without a call for each sample.
        return chain(self._first(samples, int(self._start[1])), samples)

    def _begin(self) -> Iterator[Any]:
        epoch = int(self._start[0])
        if self._worker is not None:  # it has its own stream
            set_epoch(epoch, self.dataset, self.collate_fn)
        with self._no_worker(), keep_cpu_rng():
            seed_generators(derive_seed(self.seed, "stream", epoch))
            samples = started(self.dataset)
            self._inside = CPUState()
        return samples

    def _first(self, samples: Iterator[Any], num_consumed: int) -> Iterator[Any]:
        for position, sample in enumerate(islice(samples, max(NUM_SAMPLES, num_consumed))):
            if position < NUM_SAMPLES:
                self._first_read.note(self._worker[0] if self._worker is not None else 0, position, sample)
            if position >= num_consumed:
                yield sample

    def _no_worker(self) -> AbstractContextManager[None]:
        """Hide the worker: a stream that splits itself by worker would yield only a part of what is split here."""
        return nullcontext() if self._worker is None else without_worker_info()

    def _enter_worker(self) -> tuple[int, int]:
        info = get_worker_info()
        self._worker = None if info is None else (info.id, info.num_workers)
        return self._worker or (0, 1)
