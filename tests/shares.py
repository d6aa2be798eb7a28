"""Streams, and batches of a process's share in which it has samples."""

from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from runnerkit.sampling.sharding import batches_of, count_batches, share_of


class Stream(IterableDataset[Any]):
    """A stream of what it is given."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.samples)


class Rewinding:
    """An iterator over `samples` that starts again whenever it is asked for its iterator."""

    def __init__(self, samples: Iterable[Any]) -> None:
        self.samples, self.num_starts = samples, 0

    def __iter__(self) -> Iterator[Any]:
        self.rest, self.num_starts = iter(self.samples), self.num_starts + 1
        return self

    def __next__(self) -> Any:
        return next(self.rest)


def counted(shard: Any) -> Iterator[Any]:
    """Yield the batches of `shard`, without one that it repeats because other processes have samples left."""
    share, number = share_of(shard), -1
    for number, batch in enumerate(batches_of(shard)):
        sizes = share.sizes_of(number) if share.training and share.world_size > 1 else None
        if sizes is None or sizes[share.rank] != 0:
            yield batch
        else:
            assert number + 1 == count_or_none(shard, number + 1), "only the last step may be uneven"


def count_or_none(shard: Any, default: int) -> int:
    """Return the number of batches; `default` if it is unknown."""
    length = count_batches(shard)
    return default if length is None else length
