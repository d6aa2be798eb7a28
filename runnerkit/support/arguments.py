"""Checks of the arguments of callbacks and loggers; errors name the class and the argument."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from os import PathLike
from typing import Any


def check_integers(owner: object, *, least: int | None = 1, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is an integer >= `least`.

    Raises:
        TypeError, ValueError: with the class of `owner`, the argument, its value and what is accepted.

    >>> check_integers([], least=2, size=2.5)
    Traceback (most recent call last):
    TypeError: list: size must be an integer >= 2, got 2.5
    """
    bound = "" if least is None else f">= {least}"
    _check(owner, Integral, f"an integer {bound}".strip(), or_none, given)
    for name, value in given.items():
        if value is not None and least is not None and value < least:
            raise ValueError(_words(owner, name, bound, or_none, value))


def check_numbers(
    owner: object, *, least: float = -math.inf, above: float = -math.inf, or_none: bool = False, **given: Any
) -> None:
    """Raise unless each value is a number, not NaN, >= `least` and > `above`; errors as in `check_integers`."""
    bound = f"> {above}" if above > -math.inf else f">= {least}" if least > -math.inf else ""
    _check(owner, Real, f"a number {bound}".strip(), or_none, given)
    for name, value in given.items():
        if value is not None and not (value >= least and (value > above or above == -math.inf)):
            raise ValueError(_words(owner, name, bound or "a number", or_none, value))


def check_strings(owner: object, *, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is a str."""
    _check(owner, str, "a str", or_none, given)


def check_paths(owner: object, *, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is a str or a path."""
    _check(owner, (str, PathLike), "a path", or_none, given)


def check_mappings(owner: object, **given: Any) -> None:
    """Raise unless each value is a dict or None."""
    _check(owner, Mapping, "a dict", True, given)


def check_names(owner: object, *, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is a list of str that is not empty."""
    _check(owner, Collection, "a list of str", or_none, given)
    for name, value in given.items():
        if value is not None and (isinstance(value, str) or any(not isinstance(each, str) for each in value)):
            raise TypeError(_words(owner, name, "a list of str", or_none, value))
        if value is not None and not len(value):
            raise ValueError(_words(owner, name, "a list of one str or more", or_none, value))


def check_keys(owner: object, *, or_none: bool = False, **given: Any) -> None:
    """Raise unless each value is a batch key: a str, a list or dict of them, or a configuration's types of these."""
    accepted = "a str, a list of str or {batch key: name}"
    _check(owner, (str, Sequence, Mapping), accepted, or_none, given)
    for name, value in given.items():
        if value is not None and not isinstance(value, str) and any(not isinstance(each, str) for each in value):
            raise TypeError(_words(owner, name, accepted, or_none, value))


def _check(owner: object, kind: Any, accepted: str, or_none: bool, given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        is_one = isinstance(value, kind) and not (kind in (Integral, Real) and isinstance(value, bool))
        if not is_one and not (or_none and value is None):
            raise TypeError(_words(owner, name, accepted, or_none, value))


def _words(owner: object, name: str, accepted: str, or_none: bool, value: Any) -> str:
    return f"{type(owner).__name__}: {name} must be {accepted}{' or None' * or_none}, got {value!r}"
