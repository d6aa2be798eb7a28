"""Calls of ``set_epoch`` on all parts of a loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

# Attributes of loaders, shares, samplers, subsets and concatenations.
_HELD = ("origin", "batch_sampler", "sampler", "batches", "dataset", "datasets", "collate_fn")


def set_epoch(epoch: int, *holders: Any) -> None:
    """Call ``set_epoch`` once on each of `holders` and on each part of them, such as samplers and data sets."""
    parts = list(holders)
    known = set(map(id, parts))
    for part in parts:  # grows in the loop
        for each in _held_by(part):
            if each is not None and id(each) not in known:
                known.add(id(each))
                parts.append(each)
    methods = (getattr(part, "set_epoch", None) for part in parts)
    for method in dict.fromkeys(each for each in methods if callable(each)):
        method(epoch)


def _held_by(part: Any) -> Iterator[Any]:
    for name in _HELD:
        held = getattr(part, name, None)
        if name == "datasets":  # of a ConcatDataset, a StackDataset
            yield from held.values() if isinstance(held, dict) else held if isinstance(held, list | tuple) else ()
        else:
            yield held
