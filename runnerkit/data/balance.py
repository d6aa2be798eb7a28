"""Samplers that balance the classes of an epoch or of every batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Literal

from torch.utils.data import Sampler

from runnerkit.data.class_positions import Labels, draw, indices_by_class, shuffled
from runnerkit.support.deprecation import Renamed, accepts_old_names

__all__ = ["BalanceClassSampler", "BatchBalanceClassSampler"]


class BalanceClassSampler(Sampler[int]):
    """A sampler that shuffles the same number of samples of each class in every epoch.

    It draws from torch's global generator, so the engine shards one common order among the processes.

    Args:
        labels: (N,) one label per sample of the data set.
        strategy: samples per class: "downsampling" uses the size of the rarest class, "upsampling" that of the most
            common one, or pass a number. A smaller class repeats all of its samples before it repeats any of them
            again.

    >>> sampler = BalanceClassSampler([0, 0, 0, 1], strategy="upsampling")
    >>> len(sampler), sorted(sampler)
    (6, [0, 1, 2, 3, 3, 3])
    """

    @accepts_old_names(Renamed("mode", "strategy"))
    def __init__(self, labels: Labels, strategy: Literal["downsampling", "upsampling"] | int = "downsampling") -> None:
        self.num_labels = len(labels)
        self._indices = indices_by_class(labels)
        sizes = [len(each) for each in self._indices.values()]
        if strategy == "downsampling":
            self.samples_per_class = min(sizes)
        elif strategy == "upsampling":
            self.samples_per_class = max(sizes)
        elif isinstance(strategy, int) and strategy >= 1:
            self.samples_per_class = strategy
        else:
            raise ValueError(
                f"strategy must be 'downsampling', 'upsampling' or a number of samples >= 1, got {strategy!r}"
            )

    def __len__(self) -> int:
        return self.samples_per_class * len(self._indices)

    def __iter__(self) -> Iterator[int]:
        return iter(shuffled([draw(each, self.samples_per_class) for each in self._indices.values()]))


class BatchBalanceClassSampler(Sampler[list[int]]):
    """A batch sampler that draws `num_samples` from each of `num_classes` classes, for losses on pairs or triplets.

    Pass it to ``DataLoader(batch_sampler=...)``. The classes of a batch and their samples are drawn without replacement
    from Python's global generator; smaller classes repeat their samples. Each process gets whole batches.

    Args:
        labels: (N,) one label per sample of the data set.
        num_classes: classes per batch.
        num_samples: samples per class.
        num_batches: batches per epoch; None derives it from the size of the data set.

    >>> sampler = BatchBalanceClassSampler([0, 0, 0, 1, 1, 2, 2, 2], num_classes=2, num_samples=2)
    >>> len(sampler), sampler.batch_size
    (2, 4)
    """

    def __init__(self, labels: Labels, num_classes: int, num_samples: int, num_batches: int | None = None) -> None:
        by_class = indices_by_class(labels)
        if not 1 <= num_classes <= len(by_class):
            raise ValueError(f"num_classes must be in [1, {len(by_class)}], the number of classes; got {num_classes}")
        if num_samples < 1:
            raise ValueError(f"num_samples must be >= 1, got {num_samples}")
        if num_batches is not None and num_batches < 1:
            raise ValueError(f"num_batches must be >= 1, got {num_batches}; None derives it from the data set")
        self.num_labels = len(labels)
        self.num_classes = num_classes
        self.num_samples = num_samples
        self.batch_size = num_classes * num_samples
        self.num_batches = num_batches or max(1, len(labels) // self.batch_size)
        self._indices = [each.tolist() for each in by_class.values()]

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.num_batches):
            classes = random.sample(self._indices, self.num_classes)
            yield [index for indices in classes for index in _sample(indices, self.num_samples)]


def _sample(indices: list[int], count: int) -> list[int]:
    # Not by permuting the class, which may be a million times larger than its part of a batch.
    whole, rest = divmod(count, len(indices))
    return indices * whole + random.sample(indices, rest)
