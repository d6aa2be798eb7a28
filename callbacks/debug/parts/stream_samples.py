"""Verification that the processes of a job see one common stream, each sample once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from runnerkit.callbacks.debug.parts.recorded_loader import replay
from runnerkit.sampling.streams.heads import fingerprint_of


def first_difference(loader: Any, seen: Sequence[Sequence[int]]) -> tuple[int, int] | None:
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
