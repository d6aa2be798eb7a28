"""A process's exact share of an IterableDataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from runnerkit.sampling.sampler import Uneven, set_epoch, shortest_tail
from runnerkit.sampling.seeded_dataset import seed_collate
from runnerkit.sampling.stream_heads import NUM_SAMPLES, StreamHead
from runnerkit.seeding.generators import GENERATORS, SEED_STRIDE, CPUState, derive_seed, keep_cpu_rng, seed_generators
from runnerkit.support.torch_internals import without_worker_info

_NUM_WATCHED = 64  # samples before which all generators are seeded, to see which are used
_END = object()


class ShardedStream(IterableDataset[Any]):
    """Batches of one process, as lists of samples, from a stream that each process and each worker reads whole.

    Sample i of the stream belongs to the process and the batch that sample i of a map-style data set would belong to.
    Samples of other processes and workers are read and discarded, so the stream should yield cheap items (a line, a
    record, a reference); expensive work such as decoding belongs in ``collate_fn``, which gets this worker's samples
    only. The generators that the stream draws from are seeded by (seed, epoch, i) before sample i is read, so a stream
    shuffles identically everywhere.

    Args:
        dataset: must be the same stream in every process. ``get_worker_info()`` returns None while it is read,
            as in a process without workers.
        batch_size: samples per batch and process; None if the stream yields batches, which are distributed whole.
        drop_last: drop the last global batch if it is short.
        training: all processes get the same number of batches.
        uneven: whether, in training, whole batches that are too few for all processes are dropped or repeated.
        rank, world_size: of the share.
        seed: determines the random numbers, together with the epoch.
        key: the loader's, for messages.
        collate_fn: the loader's; persistent workers call its ``set_epoch``.
        num_workers: the loader's.

    Attributes:
        head: fingerprints of the first samples, for comparing processes; None with one process.
    """

    def __init__(
        self, dataset: Any, *, batch_size: int | None, drop_last: bool, training: bool, uneven: Uneven,
        rank: int, world_size: int, seed: int, key: str, collate_fn: Any = None, num_workers: int = 0,
    ) -> None:  # fmt: skip
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.training = training
        self.uneven = uneven
        self.rank = rank
        self.world_size = world_size
        self.seed = seed
        self.key = key
        self.collate_fn = collate_fn
        # Epoch; samples consumed before; length below which a tail joined them. In shared memory, for persistent
        # workers.
        self._start = torch.zeros(3, dtype=torch.int64)
        self._start.share_memory_()
        self.stride = (batch_size or 1) * world_size  # samples from one batch of this process to its next
        self._worker: tuple[int, int] | None = None
        self._drawn_from: set[str] = set()  # generators that the stream draws from
        self.head = StreamHead(num_workers) if world_size > 1 else None

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` at the stream's first sample."""
        self._start.copy_(torch.tensor([epoch, 0, 0]))

    def position_after(self, num_batches: int) -> list[int]:
        """Return how many samples all processes have consumed after `num_batches` of this one.

        The second number is the length below which a tail joined the last batch; only further reading shows if it did.
        """
        return [self.num_consumed + num_batches * self.stride, self._shortest_tail]

    def skip(self, position: Any) -> None:
        """Skip what was consumed before an interruption: it is read again and discarded.

        Raises:
            ValueError: the position is that of a stream with lanes.
        """
        if isinstance(position, dict):
            saved = tuple(position["lanes"])
            raise ValueError(
                f"loader {self.key!r}: its position was saved with lanes={saved}, but now its stream is not divided; "
                "resume with processes and workers that divide the lanes, and with epoch_steps"
            )
        self._start[1:] = torch.tensor(position)

    @property
    def shares_whole_batches(self) -> bool:
        """True if processes take turns by batches, not by samples."""
        return self.batch_size is None

    @property
    def num_consumed(self) -> int:
        """Samples that all processes took before the epoch was interrupted."""
        return int(self._start[1])

    def __len__(self) -> int:
        """Return the number of this process's batches; TypeError if the stream does not have a length."""
        num_left = max(0, len(self.dataset) - self.num_consumed)
        if num_left < int(self._start[2]):
            return 0
        num_whole, tail = divmod(num_left, self.stride)
        if num_whole and tail < self._shortest_tail:
            return num_whole
        return num_whole + bool(self._part(list(range(self.rank, tail, self.world_size)), tail, spare=0))

    def __iter__(self) -> Iterator[Any]:
        """Yield this process's part of each chunk of ``batch_size * world_size`` samples; a worker yields its share.

        One part is held back, because a tail too short to give every process a batch joins the chunk before.
        """
        worker, num_workers = self._enter_worker()
        samples = self._left(self._samples())
        held: list[Any] = []
        for number in count():
            part, size, spare, samples = self._read(samples, number * self.stride)
            if number and size < self._shortest_tail:
                held = held and held + part
                size = 0
            if held:
                self._seed_collate(number - 1)
            yield from self._batches(held)
            if not size:
                return
            part = self._part(part, size, spare)
            held = part if number % num_workers == worker else []

    def _seed_collate(self, number: int) -> None:
        position = self.num_consumed + number * self.stride + self.rank
        seed_collate(self.collate_fn, seed=self.seed, epoch=int(self._start[0]), position=position)

    def _batches(self, part: list[Any]) -> list[Any]:
        return part if self.batch_size is None else [part] if part else []

    @property
    def _shortest_tail(self) -> int:
        if self.batch_size is None or self.drop_last:
            return 0
        return shortest_tail(self.stride, self.world_size)

    def _part(self, part: list[Any], size: int, spare: Any) -> list[Any]:
        """Return this process's part of a chunk of `size` samples, which is short at the stream's end."""
        if size == self.stride or size == 0:
            return part
        if self.drop_last:
            return []
        if self.training and size < self.world_size:
            if self.batch_size is not None:
                raise ValueError(
                    f"loader {self.key!r}: its stream had {size} samples left, too few to train {self.world_size} "
                    f"processes; {'resume with as many as before, or ' if self.num_consumed else ''}use drop_last=True"
                )
            return [] if self.uneven == "drop" else part or [spare]
        return part

    def _read(self, samples: Iterator[Any], begin: int) -> tuple[list[Any], int, Any, Iterator[Any]]:
        """Read one chunk, after `begin` samples of this pass.

        If it moves a generator that was not seeded, the stream is read again, with that generator seeded.

        Returns:
            This process's samples, the number of all samples, the first one, and the samples behind.
        """
        before = CPUState()
        # A stream that splits itself by worker would yield only a part of the samples that are split here.
        with without_worker_info() if self._worker is not None else nullcontext():
            part, size, spare = self._chunk(samples)
            while moved := before.moved(apart_from=self._drawn_from):
                self._drawn_from |= moved
                samples = self._left(self._samples())
                next(islice(samples, begin, begin), None)  # skips them
                part, size, spare = self._chunk(samples)
        if self._worker is None:  # the model uses the generators too; in a worker, nothing else does
            before.restore(self._drawn_from)
        return part, size, spare, samples

    def _chunk(self, samples: Iterator[Any]) -> tuple[list[Any], int, Any]:
        part, size, spare = [], 0, None
        for offset, sample in enumerate(islice(samples, self.stride)):
            size += 1
            if offset == 0:
                spare = sample
            if offset % self.world_size == self.rank:
                part.append(sample)
        return part, size, spare

    def _left(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Yield the rest of an interrupted epoch, without a tail that had joined the last batch."""
        first = list(islice(samples, int(self._start[2])))
        if len(first) == self._start[2]:
            yield from first
            yield from samples

    def _samples(self) -> Iterator[Any]:
        epoch, num_consumed, _ = self._start.tolist()
        if self._worker is not None:  # it has its own stream
            set_epoch(epoch, self.dataset, self.collate_fn)
        drawn_from = self._drawn_from
        with keep_cpu_rng():
            seed_generators(derive_seed(self.seed, "stream", epoch))
            iterator = iter(self.dataset)
        base = derive_seed(self.seed, "sample", epoch)
        for position in count():
            seed = base + SEED_STRIDE * position
            if position < _NUM_WATCHED:  # find out here, as reading again may be expensive
                sample = self._watched(iterator, seed)
            else:
                for name in drawn_from:
                    GENERATORS[name](seed)
                sample = next(iterator, _END)
            if sample is _END:
                return
            if self.head is not None and position < NUM_SAMPLES:
                self.head.note(self._worker[0] if self._worker is not None else 0, position, sample)
            if position >= num_consumed:
                yield sample

    def _watched(self, iterator: Iterator[Any], seed: int) -> Any:
        """Return the next sample, after seeding all generators, and note which of them it draws from."""
        before = CPUState()
        seed_generators(seed)
        seeded = CPUState()
        sample = next(iterator, _END)
        self._drawn_from |= seeded.moved(apart_from=self._drawn_from)
        before.restore(GENERATORS.keys() - self._drawn_from)
        return sample

    def _enter_worker(self) -> tuple[int, int]:
        info = get_worker_info()
        self._worker = None if info is None else (info.id, info.num_workers)
        return self._worker or (0, 1)
