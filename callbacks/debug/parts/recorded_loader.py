"""Recording of the batches that each process runs, and their replay in a single process."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset, Sampler

from runnerkit.sampling.feed import feed_of
from runnerkit.sampling.indexed.sampler import Place, PlacedBatch, Places
from runnerkit.sampling.loader_members import LoaderMembers
from runnerkit.sampling.sharding import batches_of, share_of
from runnerkit.support.plain_values import attributes_of
from runnerkit.types import Batch

# By rank: the number of batches that ran, and the indices in each; None if the loader does not report them.
Passes: TypeAlias = list[tuple[int, list[Any] | None]]


class RecordedSampler(Sampler[Any]):
    """A batch sampler, or for ``batch_size=None`` a sampler, that records what it yields in the current pass.

    Attributes:
        given: the indices in each batch, in order; workers may have prefetched more batches than were run.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.given: list[Any] = []

    def __iter__(self) -> Iterator[Any]:
        self.given = given = []
        for each in self.sampler:
            given.append(each)
            yield each

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def order(self) -> list[Any] | None:
        """The part of the epoch's global order that this pass covers; None if there is no such order."""
        share = share_of(self)
        return None if share.order is None else list(indices_in(share.order[share.num_consumed :]))

    @property
    def _share(self) -> Any:
        return self.sampler.share if isinstance(self.sampler, Places) else self.sampler


def indices_in(value: Any) -> Iterator[Any]:
    """Yield the indices in nested lists and places."""
    if isinstance(value, PlacedBatch):
        yield from indices_in(value.indices)
    elif isinstance(value, Place):
        yield from indices_in(value.index)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from indices_in(each)
    else:
        yield value


def is_list_of_samples(batch: Any) -> bool:
    """Return whether a batch is a list of indices rather than a single one, as with ``batch_size=None``."""
    return isinstance(batch, list | tuple) and not (isinstance(batch, Place) and not is_list_of_samples(batch.index))


def unwrapped(loader: Any) -> Any:
    """Return the innermost loader of wrappers that hold another one as `origin`."""
    while hasattr(loader, "origin"):
        loader = loader.origin
    return loader


def is_stream(loader: Any) -> bool:
    """Return whether the samples are not numbered, but each process can read the shard of any other one."""
    return isinstance(LoaderMembers(feed_of(unwrapped(loader))).dataset, IterableDataset)


def record_loader(loader: Any) -> RecordedSampler | None:
    """Make `loader` record its batches; return None if its samples are not numbered (a stream, a list)."""
    inner = unwrapped(loader)
    feed = feed_of(inner)
    name = _sampler_name(feed)
    if name is None or not isinstance(LoaderMembers(inner).dataset, Sized):
        return None
    if not isinstance(vars(feed)[name], RecordedSampler):
        vars(feed)[name] = RecordedSampler(vars(feed)[name])  # DataLoader.__setattr__ refuses this
    return vars(feed)[name]  # type: ignore[no-any-return]


def stop_recording(loader: Any) -> None:
    """Restore the original sampler of `loader`."""
    feed = feed_of(unwrapped(loader))
    name = _sampler_name(feed)
    if name is not None and isinstance(vars(feed)[name], RecordedSampler):
        vars(feed)[name] = vars(feed)[name].sampler


def replay(loader: Any, passes: Passes) -> Iterator[Batch]:
    """Yield the batches that all processes ran, in a single process: rank after rank, batch after batch.

    Args:
        loader: this process's shard; its samples are recorded, or it is a stream, or there is only one process.
        passes: the passes of all ranks.
    Raises:
        ValueError: the loader yields fewer batches than before.
    """
    for rank, (num_batches, given) in enumerate(passes):
        left = num_batches
        while left:  # a wrapper that limits the number of batches ends too early when they are split
            rest = None if given is None else given[num_batches - left :]
            before = left
            for batch in islice(batches_of(_replayed(loader, rest, rank=rank)), left):
                left -= 1
                yield batch
            if left == before:
                kind, num_again = type(unwrapped(loader)).__name__, num_batches - left
                raise ValueError(
                    f"a {kind} yielded {num_batches} batches, and {num_again} in a second pass; a loader must yield "
                    "its batches in each pass, since each epoch makes one"
                )


def _replayed(loader: Any, given: list[Any] | None, *, rank: int) -> Any:
    if unwrapped(loader) is not loader:
        wrapper = copy.copy(loader)
        wrapper.origin = _replayed(loader.origin, given, rank=rank)
        return wrapper
    feed = feed_of(loader)
    replaced: dict[str, Any] = {}
    if is_stream(feed):
        return _of_rank(loader, feed, rank)
    if given is not None:
        replaced[str(_sampler_name(feed))] = given
    if not replaced:
        return loader
    feed = copy.copy(feed)
    vars(feed).update(replaced)  # as in runnerkit.sampling.sharding.shard_loader: keep the user's other settings
    if isinstance(feed, DataLoader):
        feed._iterator = None
    return feed


def _of_rank(loader: Any, feed: Any, rank: int) -> Any:
    """Return a copy of a shard of a stream that reads another rank's shard."""
    stream = copy.copy(feed.dataset)
    stream.rank = rank
    replaced = {"dataset": stream, "_iterator": None}
    if hasattr(stream, "collate"):
        replaced["collate_fn"] = stream.collate
    feed, shard = copy.copy(feed), copy.copy(loader)
    vars(feed).update(replaced)
    vars(shard).update(_feed=feed, _share=stream)
    return shard


def split_batches_unequally(passes: Passes) -> Passes | None:
    """Split each batch into two unequal ones, so that a mean of batch means changes too; None if that is impossible."""
    if any(given is None or not all(map(_can_split, given)) for _, given in passes):
        return None
    pieces = [[part for batch in given or () for part in _unequal_parts(batch)] for _, given in passes]
    return [(len(parts), parts) for parts in pieces]


def _can_split(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and not isinstance(batch, Place)


def _unequal_parts(batch: Any) -> list[Any]:
    if isinstance(batch, PlacedBatch):
        third, end = -(-len(batch.indices) // 3), len(batch.indices)
        return [part for part in (batch.part(0, third), batch.part(third, end)) if part.indices]
    third = -(-len(batch) // 3)
    return [part for part in (batch[:third], batch[third:]) if part]


def _sampler_name(feed: Any) -> str | None:
    """Return the name of the attribute that holds the sampler or batch sampler."""
    if is_stream(feed):
        return None
    names = ("batch_sampler", "sampler") if isinstance(feed, DataLoader) else ("batch_sampler",)
    return next((name for name in names if attributes_of(feed).get(name) is not None), None)
