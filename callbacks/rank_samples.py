"""Which samples each process was given, and whether they were shared out exactly."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, Sampler

from runnerkit.sampler import Place
from runnerkit.sharding import feed_of

_NUM_NAMED = 5


class RecordedBatches(Sampler[list[int]]):
    """A batch sampler that remembers what it gave in the pass under way.

    Attributes:
        given: batches of indices, in order; workers may have asked for more than were run.
    """

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.given: list[list[int]] = []
        for name in ("set_epoch", "position_after", "skip"):  # only those it has: whoever asks looks for them
            if hasattr(batch_sampler, name):
                setattr(self, name, getattr(batch_sampler, name))

    def __iter__(self) -> Iterator[list[int]]:
        self.given = given = []
        for batch in self.batch_sampler:
            given.append([each.index if isinstance(each, Place) else each for each in batch])
            yield batch

    def __len__(self) -> int:
        return len(self.batch_sampler)

    @property
    def order(self) -> list[int] | None:
        """What of the epoch's global order all processes share in this pass; None if they share none."""
        share = getattr(self.batch_sampler, "share", self.batch_sampler)
        order = getattr(share, "order", None)
        return None if order is None else list(_flat(order[share.num_consumed :]))


def record(loader: Any) -> RecordedBatches | None:
    """Let `loader` remember its batches; None if it knows no indices (a stream, a list)."""
    feed = feed_of(loader)
    if not isinstance(feed, DataLoader) or feed.batch_sampler is None:
        return None
    if not isinstance(feed.batch_sampler, RecordedBatches):
        vars(feed)["batch_sampler"] = RecordedBatches(feed.batch_sampler)  # DataLoader forbids the plain way
    recorded: Any = feed.batch_sampler
    return recorded  # type: ignore[no-any-return]


def stop_recording(loader: DataLoader[Any]) -> None:
    """Give `loader` its own batch sampler back."""
    feed = feed_of(loader)
    if isinstance(feed.batch_sampler, RecordedBatches):
        vars(feed)["batch_sampler"] = feed.batch_sampler.batch_sampler


@dataclass(frozen=True)
class Share:
    """What one process ran of a pass over a loader.

    Attributes:
        batches: indices.
        order_hash: of the whole order that it took them from.
        is_complete: whether the pass went to its end.
    """

    batches: list[list[int]]
    order_hash: str
    is_complete: bool

    @classmethod
    def of(cls, recorded: RecordedBatches, *, num_batches: int, is_complete: bool) -> Share:
        """Take what was run; the batches after are those that workers had asked for."""
        order_hash = hashlib.sha256(repr(recorded.order).encode()).hexdigest()
        return cls(recorded.given[:num_batches], order_hash, is_complete)


def samples_in_words(shares: Sequence[Share], *, loader: DataLoader[Any], key: str, order: list[int] | None) -> str:
    """Say what the processes saw together.

    Args:
        shares: by rank.
        loader: of this process, as recorded.
        key: its key.
        order: what of the epoch's global order they share; None for a loader that the user shares out.
    Raises:
        ValueError: samples were given twice or left out, with what to do.
    """
    sampler = _sampler_name(loader)
    strangers = [rank for rank, share in enumerate(shares) if share.order_hash != shares[0].order_hash]
    if order is not None and strangers:
        raise ValueError(
            f"loader {key!r}: rank {strangers[0]} lists the samples in another order than rank 0, so that some are "
            f"seen twice and some never: {sampler} depends on the rank, or draws from a generator of its own. Draw "
            "from torch's, numpy's or python's global one, which are seeded alike, and leave the sharing to the engine"
        )
    seen = Counter(index for share in shares for index in _flat(share.batches))
    due = Counter(seen.keys()) if order is None else Counter(order[: seen.total()])
    twice, missed = seen - due, due - seen
    size, who = len(loader.dataset), f"{len(shares)} ranks" if len(shares) > 1 else "1 process"  # type: ignore[arg-type]  # it has indices: map-style
    is_complete = all(share.is_complete for share in shares)
    if twice and not missed and is_complete and _pads(loader) and twice.total() < len(shares):
        return (
            f"{who} saw {len(seen)} of the {size} samples of loader {key!r}, and of these {_named(twice)} twice: its "
            "own DistributedSampler repeats some to give each rank equally many; without it the engine repeats none"
        )
    if twice or missed:
        what = f"were given {_named(twice)} more than once" if twice else f"were not given {_named(missed)}"
        raise ValueError(
            f"loader {key!r}: {who} {what}. Its {sampler} does not share them out: pass the loader of the whole data "
            "set, which the engine shares out, or DistributedSampler(data, num_replicas=self.engine.num_processes, "
            "rank=self.engine.process_index)"
        )
    if seen.total() > len(seen):
        return (
            f"{who} took {seen.total()} places of the order of loader {key!r}, none twice; its {sampler} gives "
            "some samples several places"
        )
    if is_complete and len(seen) == size:
        return f"{who} saw all {size} samples of loader {key!r}, each once"
    return f"{who} saw {len(seen)} different samples of loader {key!r} (of {size}), none twice"


def _pads(loader: DataLoader[Any]) -> bool:
    return isinstance(_sampler(loader), DistributedSampler)


def _sampler(loader: DataLoader[Any]) -> Any:
    sampler: Any = loader.batch_sampler
    while True:
        names = [name for name in ("batch_sampler", "sampler", "batches") if hasattr(sampler, name)]
        if not names:
            return sampler
        sampler = getattr(sampler, names[0])


def _sampler_name(loader: DataLoader[Any]) -> str:
    return type(_sampler(loader)).__name__


def _flat(values: Iterable[Any]) -> Iterator[int]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _named(samples: Counter[int]) -> str:
    names = ", ".join(map(str, sorted(samples)[:_NUM_NAMED])) + (", ..." if len(samples) > _NUM_NAMED else "")
    return f"{_count(len(samples), 'sample')} ({names})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
