"""Deprecation of public names: the replacement, since when, until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from typing_extensions import deprecated as with_warning

T = TypeVar("T", bound=Callable[..., object])  # a function or a class


def deprecated(*, instead: str, since: str, removed_in: str) -> Callable[[T], T]:
    """Warn, at the caller's line, when a function is called, or a class is instantiated or inherited from.

    A FutureWarning, because a DeprecationWarning is hidden in modules that the training script imports.

    Args:
        instead: the replacement, as the user writes it.
        since, removed_in: versions such as "0.2.0"; a test fails if the name still exists in `removed_in`.

    >>> @deprecated(instead="new()", since="0.1.0", removed_in="1.0.0")
    ... def old():
    ...     return 1
    >>> old.__deprecated__
    'old is deprecated since 0.1.0 and will be removed in 1.0.0: use new()'
    """

    def mark(thing: T) -> T:
        message = f"{thing.__name__} is deprecated since {since} and will be removed in {removed_in}: use {instead}"
        return with_warning(message, category=FutureWarning)(thing)  # pyright: ignore[reportArgumentType]  # no literal

    return mark
