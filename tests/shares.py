"""Batches of a process's share in which it has samples."""

from collections.abc import Iterator
from typing import Any

from runnerkit.sampling.sharding import batches_of, count_batches, share_of


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
