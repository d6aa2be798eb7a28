"""Descriptions of the order in which a loader reads its samples, which a resumed epoch has to share with its start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

Order: TypeAlias = dict[str, Any]  # length, unit, kind of the sampler and seed

EndedOrder: TypeAlias = dict[str, int]  # epoch, seed, length, and the items that were listed: number and checksum

PREDICT = "predict"  # the key of a loader whose order is kept, as its predictions come in it


def check_order(key: str, saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, source: str) -> None:
    """Raise if an epoch that was interrupted would continue in another order.

    Args:
        key: the loader's.
        saved, now: from ``described()`` of the loader's share; None is not compared.
    Raises:
        ValueError: with both lengths and orders.
    """
    if saved is None or now is None or dict(saved) == dict(now):
        return
    if saved["length"] != now["length"] or saved["by"] != now["by"]:
        before, after = _describe(saved), _describe(now)
    else:
        before, after = _describe(saved), "another seed"
    raise ValueError(
        f"{source} was saved in the middle of a pass over loader {key!r} with {before}; now it has {after}: some would "
        "be repeated and others missed. Resume with the same data, shuffle and seed, or from a checkpoint of an "
        "epoch's end"
    )


def _describe(order: Mapping[str, Any]) -> str:
    return f"{order['length']} {order['unit']} in the order of {order['by']}"
