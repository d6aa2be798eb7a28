"""Which samples each process was given, and whether they were shared out exactly."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from torch.utils.data import DistributedSampler

from runnerkit.callbacks.recorded_loader import (
    RecordedSampler,
    indices_in,
    is_list_of_samples,
    is_stream,
    unwrapped,
)

_NUM_NAMED = 5


@dataclass(frozen=True)
class Share:
    """What one process ran of a pass over a loader.

    Attributes:
        num_batches: how many.
        batches: what each was made of: indices or places; None if the loader does not tell.
        order_hash: of the whole order that it took them from.
        is_complete: whether the pass went to its end.
    """

    num_batches: int
    batches: list[Any] | None
    order_hash: str
    is_complete: bool

    @classmethod
    def of(cls, recorded: RecordedSampler | None, *, num_batches: int, is_complete: bool) -> Share:
        """Take what was run; the batches after are those that workers had asked for."""
        if recorded is None or len(recorded.given) < num_batches:
            return cls(num_batches, None, "", is_complete)
        order_hash = hashlib.sha256(repr(recorded.order).encode()).hexdigest()
        return cls(num_batches, recorded.given[:num_batches], order_hash, is_complete)


def why_unknown(loader: Any) -> str:
    """Say why `loader` cannot tell which samples it gave."""
    inner = unwrapped(loader)
    if is_stream(inner):
        return f"a {type(inner.dataset).__name__} is a stream, whose samples have no indices"
    return f"a {type(inner).__name__} does not tell which samples its batches are made of"


def samples_in_words(shares: Sequence[Share], *, loader: Any, key: str, order: list[Any] | None) -> str:
    """Say what the processes saw together.

    Args:
        shares: by rank; all of them tell their batches.
        loader: of this process, as recorded.
        key: its key.
        order: what of the epoch's global order they share; None for a loader that the user shares out.
    Raises:
        ValueError: samples were given twice or left out, with what to do.
    """
    inner = unwrapped(loader)
    sampler = type(_sampler(inner)).__name__
    strangers = [rank for rank, share in enumerate(shares) if share.order_hash != shares[0].order_hash]
    if order is not None and strangers:
        raise ValueError(
            f"loader {key!r}: rank {strangers[0]} lists the samples in another order than rank 0, so that some are "
            f"seen twice and some never: {sampler} depends on the rank, or draws from a generator of its own. Draw "
            "from torch's, numpy's or python's global one, which are seeded alike, and leave the sharing to the engine"
        )
    batches = [batch for share in shares for batch in share.batches or ()]
    seen = Counter(indices_in(batches))
    due = Counter(seen.keys()) if order is None else Counter(islice(cycle(order), seen.total()))
    twice, missed = seen - due, due - seen
    size, who = len(inner.dataset), f"{len(shares)} ranks" if len(shares) > 1 else "1 process"
    is_complete = all(share.is_complete for share in shares)
    if twice and not missed and is_complete and _pads(inner) and twice.total() < len(shares):
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
    if order is not None and seen.total() > len(order):
        again = _named(seen - Counter(order))
        return (
            f"{who} saw all {len(order)} places of the order of loader {key!r}, and {again} once more: "
            'uneven_batches="pad" repeats batches to give each rank equally many'
        )
    nouns = "samples" if all(is_list_of_samples(batch) for batch in batches) else "batches of the data set's own"
    if seen.total() > len(seen):
        return (
            f"{who} took {seen.total()} places of the order of loader {key!r}, none twice; its {sampler} gives "
            f"some {nouns} several places"
        )
    if is_complete and len(seen) == size:
        return f"{who} saw all {size} {nouns} of loader {key!r}, each once"
    return f"{who} saw {len(seen)} different {nouns} of loader {key!r} (of {size}), none twice"


def _pads(loader: Any) -> bool:
    return isinstance(_sampler(loader), DistributedSampler)


def _sampler(loader: Any) -> Any:
    """Find the one that orders the samples, inside of those that make batches of it."""
    sampler = loader
    while True:
        names = ("share", "batch_sampler", "sampler", "batches")
        held = [each for name in names if (each := getattr(sampler, name, None)) is not None]
        if not held:
            return sampler
        sampler = held[0]


def _named(samples: Counter[int]) -> str:
    names = ", ".join(map(str, sorted(samples)[:_NUM_NAMED])) + (", ..." if len(samples) > _NUM_NAMED else "")
    return f"{_count(len(samples), 'sample')} ({names})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
