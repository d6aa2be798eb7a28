"""Hyperparameters as plain values, which YAML, JSON and a checkpoint that runs no code can hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np


def plain(value: Any) -> Any:
    """Reduce `value` to numbers, strings, None, lists and dicts; any other object becomes its string.

    >>> from pathlib import Path
    >>> plain({"lr": np.float32(0.5), "layers": (64, 32), "data": Path("data"), "tags": {"b", "a"}})
    {'lr': 0.5, 'layers': [64, 32], 'data': 'data', 'tags': ['a', 'b']}
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, Mapping):
        return {key if type(key) in (bool, int, float, str) else str(key): plain(each) for key, each in value.items()}
    if isinstance(value, set | frozenset):
        return sorted((plain(each) for each in value), key=repr)  # a set's order differs between processes
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return str(value)


def flat(value: Any, name: str = "", *, separator: str = ".") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dicts, with their keys joined by dots or another separator.

    >>> list(flat({"lr": 0.5, "model": {"depth": 2}}))
    [('lr', 0.5), ('model.depth', 2)]
    """
    if not isinstance(value, dict):
        yield name, value
        return
    for key, each in value.items():
        yield from flat(each, f"{name}{separator}{key}" if name else str(key), separator=separator)


def of_same_type(sequence: Any, items: Iterable[Any]) -> Any:
    """Return a list, tuple or named tuple of the type of `sequence` with other items.

    >>> of_same_type((1, 2), "ab")
    ('a', 'b')
    """
    kind = type(sequence)
    return kind(*items) if is_named_tuple(sequence) else kind(items)


def is_named_tuple(value: Any) -> bool:
    """Return whether `value` is a tuple whose items have names."""
    return isinstance(value, tuple) and hasattr(value, "_fields")


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object itself, without those of its class; none of an object without ``__dict__``.

    >>> attributes_of(1)
    {}
    """
    return getattr(value, "__dict__", {})
