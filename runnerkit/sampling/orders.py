"""Descriptions of the order in which a loader reads its samples, which a resumed epoch has to share with its start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import BatchSampler, SequentialSampler

PREDICT = "predict"  # the key of a loader whose order is kept, as its predictions come in it


def order_of(share: Any) -> dict[str, Any] | None:
    """Describe the length and order of a share as plain values; None for a stream without shards or other loaders."""
    share = getattr(share, "share", share)  # of a pass that continues from epoch to epoch
    if hasattr(share, "shards"):
        return {"length": share.shards.num_shards, "unit": "shards", "by": type(share.shards).__name__, "seed": None}
    has_batches = hasattr(share, "batches")
    source = getattr(share, "batches" if has_batches else "sampler", None)
    if source is None:
        return None
    inner = source.sampler if isinstance(source, BatchSampler) else source
    options = {name: value for name in ("replacement", "shuffle") if (value := getattr(inner, name, False))}
    words = ", ".join(f"{name}={value}" for name, value in options.items())
    return {
        "length": len(source),
        "unit": "batches" if has_batches else "samples",
        "by": type(inner).__name__ + (f"({words})" if words else ""),
        "seed": None if isinstance(inner, SequentialSampler) else share.seed,
    }


def check_order(key: str, saved: Mapping[str, Any] | None, now: Mapping[str, Any] | None, source: str) -> None:
    """Raise if an epoch that was interrupted would continue in another order.

    Args:
        key: the loader's.
        saved, now: from :func:`order_of`; None is not compared.
    Raises:
        ValueError: with both lengths and orders.
    """
    if saved is None or now is None or dict(saved) == dict(now):
        return
    if saved["length"] != now["length"] or saved["by"] != now["by"]:
        before, after = _words(saved), _words(now)
    else:
        before, after = _words(saved), "another seed"
    raise ValueError(
        f"{source} was saved in the middle of a pass over loader {key!r} with {before}; now it has {after}: some would "
        "be repeated and others missed. Resume with the same data, shuffle and seed, or from a checkpoint of an "
        "epoch's end"
    )


def _words(order: Mapping[str, Any]) -> str:
    return f"{order['length']} {order['unit']} in the order of {order['by']}"
