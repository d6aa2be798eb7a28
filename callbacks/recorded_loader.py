"""What a process ran of a loader: written down as it comes, and what all processes ran given once more by one."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset, Sampler

from runnerkit.sampling.sampler import Place, PlacedBatch
from runnerkit.sampling.sharding import batches_of, feed_of
from runnerkit.types import Batch

# By rank: how many batches were run, and what each is made of; None if the loader does not tell.
Passes: TypeAlias = list[tuple[int, list[Any] | None]]


class RecordedSampler(Sampler[Any]):
    """A batch sampler, or for ``batch_size=None`` a sampler, that remembers what it gave in the pass under way.

    Attributes:
        given: what each batch is made of, in order; workers may have asked for more than were run.
    """

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.given: list[Any] = []
        for name in ("set_epoch", "position_after", "skip"):  # only those it has: whoever asks looks for them
            if hasattr(sampler, name):
                setattr(self, name, getattr(sampler, name))

    def __iter__(self) -> Iterator[Any]:
        self.given = given = []
        for each in self.sampler:
            given.append(each)
            yield each

    def __len__(self) -> int:
        return len(self.sampler)

    @property
    def num_consumed(self) -> int:
        """How much of the epoch's order was consumed before an interruption."""
        return self._share.num_consumed  # type: ignore[no-any-return]

    @property
    def stride(self) -> int:
        """How much of the order all processes take in one batch."""
        return self._share.stride  # type: ignore[no-any-return]

    @property
    def order(self) -> list[Any] | None:
        """What of the epoch's global order all processes share in this pass; None if they share none."""
        order = getattr(self._share, "order", None)
        return None if order is None else list(indices_in(order[self.num_consumed :]))

    @property
    def _share(self) -> Any:
        return getattr(self.sampler, "share", self.sampler)


def indices_in(value: Any) -> Iterator[Any]:
    """Yield the indices in nested lists of indices, and in places."""
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
    """Whether a batch is made of a list; else, with ``batch_size=None``, of one index."""
    return isinstance(batch, list | tuple) and not (isinstance(batch, Place) and not is_list_of_samples(batch.index))


def unwrapped(loader: Any) -> Any:
    """Return the loader inside of those that hold another one as `origin`."""
    while hasattr(loader, "origin"):
        loader = loader.origin
    return loader


def is_stream(loader: Any) -> bool:
    """Whether the samples have no indices, but each process can read what any other one reads."""
    return isinstance(getattr(feed_of(unwrapped(loader)), "dataset", None), IterableDataset)


def record(loader: Any) -> RecordedSampler | None:
    """Let `loader` remember its batches; None if it knows no indices (a stream, a list)."""
    inner = unwrapped(loader)
    feed = feed_of(inner)
    name = _sampler_name(feed)
    if name is None or not isinstance(getattr(inner, "dataset", None), Sized):
        return None
    if not isinstance(vars(feed)[name], RecordedSampler):
        vars(feed)[name] = RecordedSampler(vars(feed)[name])  # DataLoader forbids the plain way
    return vars(feed)[name]  # type: ignore[no-any-return]


def stop_recording(loader: Any) -> None:
    """Give `loader` its own sampler back."""
    feed = feed_of(unwrapped(loader))
    name = _sampler_name(feed)
    if name is not None and isinstance(vars(feed)[name], RecordedSampler):
        vars(feed)[name] = vars(feed)[name].sampler


def replay(loader: Any, passes: Passes) -> Iterator[Batch]:
    """Yield what all processes ran of their shares, in one process: rank after rank, batch after batch.

    Args:
        loader: this process's share; one that tells its samples, or a stream, or the only process's.
        passes: of all ranks.
    Raises:
        ValueError: the loader gives less than it gave before.
    """
    for rank, (num_batches, given) in enumerate(passes):
        left = num_batches
        while left:  # a loader that ends after some batches ends, cut into smaller ones, too early
            rest = None if given is None else given[num_batches - left :]
            before = left
            for batch in islice(batches_of(_replayed(loader, rest, rank=rank)), left):
                left -= 1
                yield batch
            if left == before:
                kind, num_again = type(unwrapped(loader)).__name__, num_batches - left
                raise ValueError(
                    f"a {kind} gave {num_batches} batches, and {num_again} when asked again; a loader must give them "
                    "in each pass, as each epoch is one"
                )


def _replayed(loader: Any, given: list[Any] | None, *, rank: int) -> Any:
    if hasattr(loader, "origin"):
        wrapper = copy.copy(loader)
        wrapper.origin = _replayed(loader.origin, given, rank=rank)
        return wrapper
    feed = feed_of(loader)
    replaced: dict[str, Any] = {}
    if is_stream(feed):
        dataset = copy.copy(feed.dataset)
        dataset.rank = rank
        replaced["dataset"] = dataset
    elif given is not None:
        replaced[str(_sampler_name(feed))] = given
    if not replaced:
        return loader
    feed = copy.copy(feed)
    vars(feed).update(replaced)  # as in runnerkit.sampling.sharding.shard_loader: all else stays as the user set it
    if isinstance(feed, DataLoader):
        feed._iterator = None
    return feed


def in_pieces(passes: Passes) -> Passes | None:
    """Cut each batch into two unequal ones, so that a mean of batch means changes too; None if that cannot be done."""
    if any(given is None or not all(map(_is_cuttable, given)) for _, given in passes):
        return None
    pieces = [[part for batch in given or () for part in _unequal_parts(batch)] for _, given in passes]
    return [(len(parts), parts) for parts in pieces]


def _is_cuttable(batch: Any) -> bool:
    return isinstance(batch, list | tuple) and not isinstance(batch, Place)


def _unequal_parts(batch: Any) -> list[Any]:
    if isinstance(batch, PlacedBatch):
        third, end = -(-len(batch.indices) // 3), len(batch.indices)
        return [part for part in (batch.part(0, third), batch.part(third, end)) if part.indices]
    third = -(-len(batch) // 3)
    return [part for part in (batch[:third], batch[third:]) if part]


def _sampler_name(feed: Any) -> str | None:
    """Which attribute says what the batches are made of."""
    if is_stream(feed):
        return None
    names = ("batch_sampler", "sampler") if isinstance(feed, DataLoader) else ("batch_sampler",)
    return next((name for name in names if getattr(feed, "__dict__", {}).get(name) is not None), None)
