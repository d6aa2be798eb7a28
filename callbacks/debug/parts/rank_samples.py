"""Verification that the samples of a data set, or of a stream, are sharded exactly over the processes."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from torch.utils.data import DistributedSampler

from runnerkit.callbacks.debug.parts.recorded_loader import (
    RecordedSampler,
    indices_in,
    is_list_of_samples,
    is_stream,
    replay,
    unwrapped,
)
from runnerkit.sampling.streams.heads import fingerprint_of

_NUM_NAMED = 5


@dataclass(frozen=True)
class SeenSamples:
    """The batches that one process ran in a pass over a loader.

    Attributes:
        num_batches: number of batches.
        batches: the indices or places in each batch; None if the loader does not report them.
        order_hash: hash of the whole order of samples that they were taken from.
        is_complete: whether the pass ran to the end of the loader.
    """

    num_batches: int
    batches: list[Any] | None
    order_hash: str
    is_complete: bool

    @classmethod
    def of(cls, recorded: RecordedSampler | None, *, num_batches: int, is_complete: bool) -> SeenSamples:
        """Build the share from the batches that ran, without batches that workers prefetched and nobody used."""
        if recorded is None or len(recorded.given) < num_batches:
            return cls(num_batches, None, "", is_complete)
        order_hash = hashlib.sha256(repr(recorded.order).encode()).hexdigest()
        return cls(num_batches, recorded.given[:num_batches], order_hash, is_complete)


def why_unknown(loader: Any) -> str:
    """Explain why `loader` does not report which samples it yielded."""
    inner = unwrapped(loader)
    if is_stream(inner):
        return f"the samples of a {type(inner.dataset).__name__}, an IterableDataset, are not numbered"
    return f"a {type(inner).__name__} does not report the samples in its batches"


def describe_samples(shares: Sequence[SeenSamples], *, loader: Any, key: str, order: list[Any] | None) -> str:
    """Describe the samples that all processes saw together.

    Args:
        shares: by rank, all with known batches.
        loader: the recorded loader of this process.
        key: the loader's key.
        order: the part of the epoch's global order that this pass covers; None if the user shards the loader.
    Raises:
        ValueError: samples were repeated or left out; gives a remedy.
    """
    inner = unwrapped(loader)
    sampler = type(_sampler(inner)).__name__
    strangers = [rank for rank, share in enumerate(shares) if share.order_hash != shares[0].order_hash]
    if order is not None and strangers:
        raise ValueError(
            f"loader {key!r}: rank {strangers[0]} orders the samples differently from rank 0, so some samples are "
            f"repeated and others left out: {sampler} depends on the rank or has its own random generator. Use the "
            "global generator of torch, numpy or Python, which is seeded alike, and let the engine shard the loader"
        )
    batches = [batch for share in shares for batch in share.batches or ()]
    seen = Counter(indices_in(batches))
    due = Counter(seen.keys()) if order is None else Counter(islice(cycle(order), seen.total()))
    twice, missed = seen - due, due - seen
    size, who = len(inner.dataset), f"{len(shares)} ranks" if len(shares) > 1 else "1 process"
    is_complete = all(share.is_complete for share in shares)
    pads = isinstance(_sampler(inner), DistributedSampler)
    if twice and not missed and is_complete and pads and twice.total() < len(shares):
        return (
            f"{who} saw {len(seen)} of the {size} samples of loader {key!r}, {_named(twice)} of them twice: its "
            "DistributedSampler repeats samples to give each rank the same number; the engine alone repeats none"
        )
    if twice or missed:
        what = f"were given {_named(twice)} more than once" if twice else f"were not given {_named(missed)}"
        raise ValueError(
            f"loader {key!r}: {who} {what}. Its {sampler} does not shard them: pass the loader of the whole data "
            "set, which the engine shards, or DistributedSampler(data, num_replicas=self.engine.num_processes, "
            "rank=self.engine.process_index)"
        )
    nouns = "samples" if all(is_list_of_samples(batch) for batch in batches) else "batches of the data set's own"
    if seen.total() > len(seen):
        return (
            f"{who} saw {seen.total()} positions in the order of loader {key!r}, none twice; its {sampler} "
            f"repeats some {nouns}"
        )
    if is_complete and len(seen) == size:
        return f"{who} saw all {size} {nouns} of loader {key!r}, each once"
    return f"{who} saw {len(seen)} different {nouns} of loader {key!r} (of {size}), none twice"


def first_difference_of_stream(loader: Any, seen: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """Read the shares of all ranks in this process; return rank and batch of the first one that another process saw.

    Args:
        loader: this process's shard of a stream.
        seen: by rank, the fingerprint of each batch.
    """
    again = replay(loader, [(len(batches), None) for batches in seen])
    for rank, batches in enumerate(seen):
        for number, fingerprint in enumerate(batches, start=1):
            if fingerprint_of(next(again)) != fingerprint:
                return rank, number
    return None


def _sampler(loader: Any) -> Any:
    """Unwrap the batch samplers to find the sampler that orders the samples."""
    sampler = loader
    while True:
        names = ("share", "batch_sampler", "sampler")
        held = [each for name in names if (each := getattr(sampler, name, None)) is not None]
        if not held:
            return sampler
        sampler = held[0]


def _named(samples: Counter[int]) -> str:
    names = ", ".join(map(str, sorted(samples)[:_NUM_NAMED])) + (", ..." if len(samples) > _NUM_NAMED else "")
    return f"{_count(len(samples), 'sample')} ({names})"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
