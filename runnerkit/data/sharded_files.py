"""A data set of files that are read from start to end, each sample once by the whole job."""

from __future__ import annotations

import glob
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from runnerkit.sampling.indexed.lane_order import LaneOrder, Run, Spot
from runnerkit.sampling.lanes import check_step, checked_lanes, default_lanes
from runnerkit.seeding.generators import CPUState
from runnerkit.support.arguments import check_integers
from runnerkit.support.iterators import started

__all__ = ["ShardedFiles"]

logger = logging.getLogger(__name__)

_SLOW_S = 10.0
_END = object()


class ShardedFiles(Dataset[Any]):
    """A data set of samples in files, such as shards of JSON lines or tar archives, which a ``DataLoader`` reads.

    A job of any number of processes and data workers reads each sample once and sees the same global batches. The
    samples are cut into ``lanes`` of equal length, which the processes and workers divide; docs/streams.md explains
    the order. A run resumes within an epoch by opening each file where it was left.

    Args:
        files: paths, URLs or whatever else `read` takes; or a pattern such as "shards/*.tar", or
            "s3://bucket/shards/*.tar" for any file system of fsspec.
        read: function that yields the samples of one file, in a fixed order: ``read(path)``, or
            ``read(path, start=0)``, which skips the first `start` samples without decoding them. It must not draw
            random numbers.
        sizes: number of samples of each file, or a function of its path; None reads all files to count.
        transform: applied to each sample when it is needed; it may draw random numbers (augmentation).
        shuffle: shuffle the files in each epoch, and their samples in blocks of this many; a worker keeps one block
            for each of its lanes in memory. 0 keeps the samples' order within each lane.
        lanes: (processes, workers): any divisors of these two can share the reading exactly. (1, 1) reads the files one
            after another, which each process and worker then does. None means (1, 1) without `shuffle`, and at most one
            lane for each file with it.
    Raises:
        ValueError: there are no files or no samples, or `sizes` has another length; while reading, if a file has
            another number of samples.

    >>> pages = {"a": "abcd", "b": "efgh"}
    >>> letters = ShardedFiles(["a", "b"], read=pages.__getitem__, lanes=(2, 1))
    >>> from torch.utils.data import DataLoader
    >>> from runnerkit.sampling.sharding import batches_of, shard_loader
    >>> loader = DataLoader(letters, batch_size=2, collate_fn="".join)
    >>> place = {"key": "train", "training": True, "world_size": 2, "seed": 42}
    >>> [list(batches_of(shard_loader(loader, rank=rank, **place))) for rank in (0, 1)]
    [['ab', 'cd'], ['ef', 'gh']]
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[Any],
        read: Callable[..., Iterable[Any]],
        *,
        sizes: Sequence[int] | Callable[[Any], int] | None = None,
        transform: Callable[[Any], Any] | None = None,
        shuffle: int = 0,
        lanes: tuple[int, int] | None = None,
    ) -> None:
        self.files: list[Any] = _matching(os.fspath(files)) if isinstance(files, str | os.PathLike) else list(files)
        if not self.files:
            raise ValueError(f"ShardedFiles needs files, got {files!r}, which names none")
        check_integers(self, least=0, shuffle=shuffle)
        self.read, self.transform = read, transform
        self.shuffle = shuffle
        self.lanes = checked_lanes(lanes)
        self._can_seek = _takes_start(read)
        self.sizes = self._checked_sizes(sizes)
        self._stops = np.cumsum(self.sizes)
        self._owner = os.getpid()
        self._cursors: dict[int, _Cursor] = {}
        self._is_checked = False  # whether `read` draws
        if type(self) is ShardedFiles:  # a subclass may draw
            self.draws_nothing = transform is None

    def __len__(self) -> int:
        return int(self._stops[-1])

    def __getitem__(self, spot: Spot | int) -> Any:
        """Read the sample at a spot of :meth:`lane_order`, or the sample with a number, counted over all files."""
        [sample] = self._read([spot])
        return sample if self.transform is None else self.transform(sample)

    @property
    def __getitems__(self) -> Callable[[Sequence[Spot | int]], list[Any]] | None:
        """The reader of a batch; None if each sample is transformed, with random numbers of its own."""
        return self._read if self.transform is None and type(self) is ShardedFiles else None

    def _read(self, spots: Sequence[Spot | int]) -> list[Any]:
        if self._owner != os.getpid():  # a forked worker shares its parent's places in open files
            self._owner, self._cursors = os.getpid(), {}
        samples, cursors = [], self._cursors
        for spot in spots:
            lane, place, run = spot if isinstance(spot, tuple) else self._spot_of(spot)
            cursor = cursors.get(lane)
            if cursor is None:
                cursor = cursors[lane] = _Cursor(self)
            if cursor.run != run or (sample := cursor.samples[place]) is _END:
                cursor.read(run)
                sample = cursor.samples[place]
            # A sample that is fetched again is read again, as a transform or collate_fn may have modified it.
            cursor.samples[place] = _END
            samples.append(sample)
        return samples

    @property
    def keeps_order(self) -> bool:
        """Return whether the samples come in the order of the files."""
        return self.shuffle == 0 and self.lanes in (None, (1, 1))

    @property
    def order_options(self) -> dict[str, Any]:
        """Return what determines the order, apart from the samples, seed and epoch."""
        lanes = tuple(self.lanes or ())
        return {"blocks": self.shuffle, "lanes": lanes if self.shuffle or lanes != (1, 1) else ()}

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_cursors": {}}  # open files do not travel to workers

    def lane_order(self, *, stride: int | None, seed: int) -> LaneOrder:
        """Return the order of an epoch.

        Args:
            stride: samples in a step of the job; None if each sample is a batch.
            seed: of the epoch.
        Raises:
            ValueError: the lanes for processes do not divide `stride`.
        """
        lanes, turns = self.lanes or (default_lanes(len(self.files), stride) if self.shuffle else (1, 1))
        if stride is None:
            lanes, turns, stride = lanes * turns, 1, lanes * turns
        check_step(stride, lanes, turns)
        shuffle = min(self.shuffle, int(self.sizes.max()))  # a block is at most a file
        return LaneOrder(self.sizes, lanes=lanes, turns=turns, stride=stride, shuffle=shuffle, seed=seed)

    def _spot_of(self, number: int) -> Spot:
        number = range(len(self))[number]
        file = int(np.searchsorted(self._stops, number, side="right"))
        offset = number - int(self._stops[file]) + int(self.sizes[file])
        return -1, 0, (file, offset, offset + 1)

    def _checked_sizes(self, sizes: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        began = time.monotonic()
        if sizes is None:
            sizes = [sum(1 for _ in self.read(path)) for path in self.files]
            if time.monotonic() - began > _SLOW_S:
                logger.warning(
                    "counting the samples of %d files took %.0f s, in each process: pass sizes= to ShardedFiles",
                    len(self.files), time.monotonic() - began,
                )  # fmt: skip
        elif callable(sizes):
            sizes = [sizes(path) for path in self.files]
        counts = np.asarray(sizes, dtype=np.int64)
        if counts.shape != (len(self.files),):
            raise ValueError(f"sizes must have one number for each of {len(self.files)} files, got {counts.size}")
        if counts.min() < 0 or not counts.any():
            raise ValueError(f"sizes must be numbers >= 0, and not all 0, got {counts.tolist()[:10]}")
        return counts


class _Cursor:
    """The open file of one lane, and the samples of it that were read last.

    Attributes:
        run: that of the samples in memory.
        samples: those.
    """

    def __init__(self, dataset: ShardedFiles) -> None:
        self._dataset = dataset
        self._iterator: Iterator[Any] = iter(())
        self._next = -1, -1  # file and offset of the next sample
        self.run: Run = (-1, -1, -1)
        self.samples: list[Any] = []

    def read(self, run: Run) -> None:
        """Read the samples of a run."""
        self.run, self.samples = (-1, -1, -1), []
        samples = self._checked(run) if not self._dataset._is_checked else self._read(run)
        self._check(run, len(samples))
        file, _, stop = run
        self.run, self.samples, self._next = run, samples, (file, stop)

    def _read(self, run: Run) -> list[Any]:
        file, start, stop = run
        if (file, start) != self._next:
            self._open(file, start)
        return list(islice(self._iterator, stop - start))

    def _checked(self, run: Run) -> list[Any]:
        self._dataset._is_checked, before = True, CPUState()
        samples = self._read(run)
        if moved := before.moved():
            raise TypeError(
                f"read= of ShardedFiles draws random numbers ({', '.join(sorted(moved))}), which would differ after a "
                "resume: draw them in transform=, which is seeded for each sample"
            )
        return samples

    def _open(self, file: int, start: int) -> None:
        read, path = self._dataset.read, self._dataset.files[file]
        if self._dataset._can_seek:
            self._iterator = started(read(path, start=start))
        else:
            self._iterator = islice(read(path), start, None)

    def _check(self, run: Run, num_read: int) -> None:
        file, start, stop = run
        path, size = self._dataset.files[file], int(self._dataset.sizes[file])
        if num_read < stop - start:
            self._next = -1, -1
            raise ValueError(f"{path} ended after {start + num_read} samples, but sizes= says that it has {size}")
        if stop == size and next(self._iterator, _END) is not _END:
            raise ValueError(f"{path} has more than the {size} samples that sizes= says it has")


def _matching(pattern: str) -> list[str]:
    """Return the files that match a pattern, sorted; URLs if it is one."""
    if "://" not in pattern:
        return sorted(glob.glob(pattern))
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]  # late: opens a connection

    system, path = url_to_fs(pattern)
    return [system.unstrip_protocol(each) for each in sorted(system.glob(path))]


def _takes_start(read: Callable[..., Any]) -> bool:
    try:
        return "start" in inspect.signature(read).parameters
    except ValueError:  # a built-in function that does not tell
        return False
