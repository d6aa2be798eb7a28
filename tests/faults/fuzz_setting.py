"""Random settings of a training run, and the global batches that it must see, computed without the library."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from runnerkit import dl
from runnerkit.sampling.sharding import loader_seed
from runnerkit.seeding.generators import derive_seed

SEED = 42  # of the runs
_MOST_SAMPLES = 400
_NUM_FEATURES, _NUM_CLASSES = 5, 3
_DRAWN = torch.Generator().manual_seed(0)
FEATURES = torch.randn(_MOST_SAMPLES, _NUM_FEATURES, generator=_DRAWN, dtype=torch.float64)
TARGETS = torch.randint(_NUM_CLASSES, (_MOST_SAMPLES,), generator=_DRAWN)

Batch = list[int]  # numbers of samples


def order_of(num_samples: int, epoch: int) -> list[int]:
    """Return the order of the samples in an epoch, in all data except lanes."""
    return random.Random(epoch).sample(range(num_samples), num_samples)


class Samples(Dataset[Any]):
    """Map-style samples."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        return FEATURES[index], TARGETS[index]


class Order:
    """A sampler whose order depends on the epoch."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.epoch = num_samples, 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(order_of(self.num_samples, self.epoch))


class Ragged(Order):
    """A batch sampler whose batches differ in size."""

    def __init__(self, num_samples: int, sizes: Sequence[int]) -> None:
        super().__init__(num_samples)
        self.sizes = sizes

    def __len__(self) -> int:
        return len(self.sizes)

    def __iter__(self) -> Iterator[Any]:
        order = super().__iter__()
        return (list(islice(order, size)) for size in self.sizes)


class Stream(IterableDataset[Any]):
    """A stream that cannot be divided."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.epoch = num_samples, 1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return map(Samples(self.num_samples).__getitem__, order_of(self.num_samples, self.epoch))


class SizedStream(Stream):
    """A stream that tells its length."""

    def __len__(self) -> int:
        return self.num_samples


class Shards(IterableDataset[Any]):
    """A stream of shards."""

    def __init__(self, sizes: Sequence[int], lanes: tuple[int, int], index: int | None = None) -> None:
        self.sizes, self.lanes, self.index = sizes, lanes, index
        self.num_shards = len(sizes)

    def shard(self, num_shards: int, index: int) -> "Shards":
        return Shards(self.sizes, self.lanes, index)

    def __iter__(self) -> Iterator[Any]:
        numbers = range(sum(self.sizes)) if self.index is None else shard_of(self.sizes, self.index)
        return map(Samples(sum(self.sizes)).__getitem__, numbers)


def shard_of(sizes: Sequence[int], index: int) -> range:
    """Return the samples of a shard."""
    first = sum(sizes[:index])
    return range(first, first + sizes[index])


@dataclass(frozen=True)
class Setting:
    """Data and length of a run.

    Attributes:
        kind: "map", "tensors", "ragged", "stream", "sized" or "lanes".
        sizes: samples of each shard, or of each batch of a batch sampler; otherwise one number.
        batch: samples of a global batch; with "ragged", batches.
        limit: batches of an epoch after which a BatchLimitLoaderWrapper ends it.
    """

    kind: str
    sizes: tuple[int, ...]
    batch: int
    lanes: tuple[int, int] = (1, 1)
    drop_last: bool = False
    limit: int | None = None
    accumulation: int = 1
    epoch_steps: int | None = None
    valid_every_steps: int | None = None
    num_epochs: int | None = None
    num_steps: int | None = None
    num_samples: int | None = None
    clip: float | None = None
    dropout: float = 0.0

    @classmethod
    def draw(cls, chance: random.Random, *, processes: int, workers: int = 0) -> "Setting":
        """Draw a setting for any number of processes, and of workers, that divides the one given."""
        kind = chance.choice(["map", "map", "tensors", "ragged", "stream", "sized", "lanes", "lanes"])
        size = chance.randint(1, 4)
        batch, lanes = processes * size, (1, 1)
        sizes: tuple[int, ...] = (chance.randint(1, 60),)
        if kind == "ragged":
            sizes = tuple(chance.randint(1, 5) for _ in range(chance.randint(1, 12)))
        if kind == "lanes":
            per_turn = processes * chance.choice([each for each in range(1, size + 1) if size % each == 0])
            lanes = per_turn, chance.choice([1, 2]) * max(1, workers)
            if lanes == (1, 1):  # which is not divided
                lanes = 1, 2
            num_lanes = lanes[0] * lanes[1]
            # The first shards are not empty, as each lane needs a sample.
            sizes = tuple(chance.randint(each < num_lanes, 6) for each in range(num_lanes + chance.randint(0, 8)))
        limits: dict[str, Any] = {}
        while not limits:
            if chance.random() < 0.7:
                limits["num_epochs"] = chance.randint(1, 3)
            if chance.random() < 0.4:
                limits["num_steps"] = chance.randint(1, 14)
            if chance.random() < 0.3 and (processes == 1 or kind != "ragged"):  # nobody knows the sizes of its batches
                limits["num_samples"] = chance.randint(1, 120)

        def sometimes(share: float, value: Any) -> Any:
            return value if chance.random() < share else None

        epoch_steps = sometimes(0.35, chance.randint(1, 9))
        return cls(
            kind, sizes, batch, lanes,
            drop_last=kind in ("map", "tensors", "stream", "sized") and sizes[0] >= batch and chance.random() < 0.3,
            limit=sometimes(0.15, chance.randint(1, 6)),
            accumulation=chance.choice([1, 1, 2, 3, 4]),
            epoch_steps=epoch_steps,
            valid_every_steps=sometimes(0.3, chance.randint(1, 4)),
            clip=sometimes(0.3, 0.3),
            dropout=0.4 if processes == 1 and epoch_steps is None and chance.random() < 0.4 else 0.0,
            **limits,
        )  # fmt: skip

    @property
    def length(self) -> int:
        """Samples of a pass."""
        return sum(self.sizes)

    def loader(self, *, num_processes: int, num_workers: int = 0, persistent: bool = False) -> Any:
        """Return the training loader of a run, of which each process gets its share of a global batch."""
        options: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": persistent and num_workers > 0}
        size = self.batch // num_processes
        plain = {"batch_size": size, "drop_last": self.drop_last}
        loader: Any
        if self.kind == "map":
            loader = DataLoader(Samples(self.length), sampler=Order(self.length), **plain, **options)
        elif self.kind == "tensors":
            loader = dl.TensorLoader(FEATURES[: self.length], TARGETS[: self.length], **plain)
        elif self.kind == "ragged":
            loader = DataLoader(Samples(self.length), batch_sampler=Ragged(self.length, self.sizes), **options)
        elif self.kind == "lanes":
            loader = DataLoader(Shards(self.sizes, self.lanes), batch_size=size, **options)
        else:
            loader = DataLoader((SizedStream if self.kind == "sized" else Stream)(self.length), **plain, **options)
        if self.limit is not None:
            loader = dl.BatchLimitLoaderWrapper(loader, self.limit)
        return loader

    def epoch(self, number: int, *, num_processes: int) -> Iterator[Batch]:
        """Yield the global batches of an epoch."""
        if self.epoch_steps is None:
            return self._of_pass(number, num_processes)
        if self.kind == "lanes" and self.limit is None:
            batches = self._of_lanes(1, is_endless=True)
        else:
            batches = chain.from_iterable(self._of_pass(each, num_processes) for each in count(1))
        return islice(batches, (number - 1) * self.epoch_steps, number * self.epoch_steps)

    def _of_pass(self, number: int, num_processes: int) -> Iterator[Batch]:
        if self.kind == "lanes":
            batches = self._of_lanes(number, is_endless=self.epoch_steps is not None)
        else:
            order = range(self.length) if self.kind == "tensors" else order_of(self.length, number)
            batches = self._cut(iter(order), num_processes)
        return islice(batches, self.limit)

    def _cut(self, order: Iterator[int], num_processes: int) -> Iterator[Batch]:
        if self.kind == "ragged":
            for first in range(0, len(self.sizes), num_processes):
                yield list(islice(order, sum(self.sizes[first : first + num_processes])))
            return
        while batch := list(islice(order, self.batch)):
            if len(batch) == self.batch or not self.drop_last:
                yield batch

    def _of_lanes(self, epoch: int, *, is_endless: bool) -> Iterator[Batch]:
        lanes, turns = self.lanes
        samples = [self._lane(lane, epoch, is_endless=is_endless) for lane in range(lanes * turns)]
        num_empty = 0
        for step in count():
            first = step % turns * lanes
            rows = [list(islice(lane, self.batch // lanes)) for lane in samples[first : first + lanes]]
            batch = [row[place] for place in range(self.batch // lanes) for row in rows if place < len(row)]
            num_empty = 0 if batch else num_empty + 1
            if batch:
                yield batch
            elif num_empty == turns:
                return

    def _lane(self, lane: int, epoch: int, *, is_endless: bool) -> Iterator[int]:
        own = np.arange(lane, len(self.sizes), self.lanes[0] * self.lanes[1])
        for lap in count() if is_endless else range(1):
            drawn = np.random.default_rng(derive_seed(loader_seed(SEED, "train"), "shards", epoch, lap, lane))
            for index in drawn.permutation(own):
                yield from shard_of(self.sizes, int(index))


def network(dropout: float) -> nn.Module:
    """Return the model of all runs, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        layers = nn.Linear(_NUM_FEATURES, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, _NUM_CLASSES)
        return nn.Sequential(*layers).double()
