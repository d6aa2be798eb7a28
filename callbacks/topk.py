"""The argument `topk`: for which k a metric looks at the k best."""

from __future__ import annotations

from collections.abc import Iterable


def checked_topk(topk: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return each k once; None is 1.

    Raises:
        ValueError: there is none, or one that is no integer >= 1.

    >>> checked_topk([1, 3, 1])
    (1, 3)
    """
    ks = (1,) if topk is None else (topk,) if isinstance(topk, int) else tuple(topk)
    if not ks or any(not isinstance(k, int) or k < 1 for k in ks):
        raise ValueError(f"topk must be integers >= 1, such as (1, 3), got {topk!r}")
    return tuple(dict.fromkeys(ks))
