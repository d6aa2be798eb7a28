"""A loader limited to its first batches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, Self

from runnerkit.data.loader_wrapper import LoaderWrapper
from runnerkit.sampling.sharding import Uneven, batches_of, count_batches, share_of
from runnerkit.support.arguments import check_integers
from runnerkit.types import Batch

__all__ = ["BatchLimitLoaderWrapper"]


class BatchLimitLoaderWrapper(LoaderWrapper):
    """A loader that ends each pass after a given number of batches.

    A shuffled loader yields different batches in each epoch; :class:`BatchOverfitCallback` repeats the same ones.

    Args:
        loader: any loader.
        num_batches: a number of batches per process (int), or a fraction of the loader (float in (0, 1], rounded down,
            at least one batch).

    >>> list(BatchLimitLoaderWrapper("abcdef", num_batches=2)), len(BatchLimitLoaderWrapper("abcdef", num_batches=0.5))
    (['a', 'b'], 3)
    """

    def __init__(self, loader: Any, num_batches: int | float) -> None:
        super().__init__(loader)
        self._part = num_batches if isinstance(num_batches, float) else None
        if isinstance(num_batches, float):
            if not 0 < num_batches <= 1:
                raise ValueError(f"a float is a fraction of the loader, 0 < num_batches <= 1; got {num_batches}")
            length = count_batches(loader)
            if length is None:
                raise TypeError(
                    f"a fraction, {num_batches}, needs a loader with a length, got a {type(loader).__name__}; pass a "
                    "number of batches, an int"
                )
            self.num_batches = self._part_of(length)
        else:
            check_integers(self, num_batches=num_batches)
            self.num_batches = int(num_batches)

    def __iter__(self) -> Iterator[Batch]:
        return islice(batches_of(self.origin), self._num_left())

    def __len__(self) -> int:
        return min(self._num_left(), super().__len__())

    def shard(
        self, *, key: str, training: bool, rank: int, world_size: int, seed: int, uneven: Uneven = "drop",
        endless: bool = False,
    ) -> Self:  # fmt: skip
        place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": seed}
        limited = super().shard(key=key, training=training, endless=endless, **place)
        if self._part is not None:  # the same number on all ranks, even if one has an extra batch
            limited.num_batches = self._part_of(math.ceil(super().__len__() / world_size))
        return limited

    def _part_of(self, length: int) -> int:
        assert self._part is not None
        return max(1, int(length * self._part))

    def _num_left(self) -> int:
        """Count the batches left in this pass; those of a resumed epoch before the interruption are subtracted."""
        share = share_of(self.origin)
        return max(0, self.num_batches - share.num_consumed // share.stride)
