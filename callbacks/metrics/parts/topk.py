"""Validation of the argument `topk`."""

from __future__ import annotations

from collections.abc import Iterable


def checked_topk(owner: object, topk: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the distinct values of k; None is 1. Errors name the class of `owner`.

    Raises:
        TypeError, ValueError: `topk` is empty or a k is not an integer >= 1.

    >>> checked_topk(None, [1, 3, 1])
    (1, 3)
    """
    ks = (1,) if topk is None else tuple(topk) if isinstance(topk, Iterable) else (topk,)
    if not ks or any(not isinstance(k, int) or isinstance(k, bool) or k < 1 for k in ks):
        raise ValueError(f"{type(owner).__name__}: topk must be integers >= 1, such as (1, 3), got {topk!r}")
    return tuple(dict.fromkeys(ks))
