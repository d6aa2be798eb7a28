"""Iterators that are not started twice."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

Item = TypeVar("Item")

# Their iterators return themselves and do nothing else.
_KNOWN = ("builtins", "itertools", "runnerkit", "torch", "torchdata")


def started(items: Iterable[Item]) -> Iterator[Item]:
    """Return an iterator that may be passed to ``iter``, so also to ``islice``, ``chain`` and ``for``, at any time.

    Many classes return themselves from ``__iter__`` after starting again from their first item.

    >>> from itertools import islice
    >>> numbers = started(range(4))
    >>> list(islice(numbers, 2)), list(islice(numbers, 2))
    ([0, 1], [2, 3])
    """
    iterator = iter(items)
    return iterator if type(iterator).__module__.partition(".")[0] in _KNOWN else _rest(iterator)


def _rest(iterator: Iterator[Any]) -> Iterator[Any]:
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item
