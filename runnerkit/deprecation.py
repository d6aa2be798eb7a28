"""Names that go away: what to take instead, since when, until when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from typing_extensions import deprecated as with_warning

T = TypeVar("T", bound=Callable[..., object])  # a function or a class


def deprecated(*, instead: str, since: str, removed_in: str) -> Callable[[T], T]:
    """Let whoever calls a function, makes an object of a class or inherits from it be told, at their own line.

    A FutureWarning: a DeprecationWarning would reach nobody whose training script imports a module of theirs.

    Args:
        instead: what to take, as the user writes it.
        since, removed_in: versions such as "0.2.0"; a test fails where one is removed later than it says.

    >>> @deprecated(instead="new()", since="0.1.0", removed_in="1.0.0")
    ... def old():
    ...     return 1
    >>> old.__deprecated__
    'old is deprecated since 0.1.0 and goes away in 1.0.0: take new()'
    """

    def mark(thing: T) -> T:
        message = f"{thing.__name__} is deprecated since {since} and goes away in {removed_in}: take {instead}"
        return with_warning(message, category=FutureWarning)(thing)  # pyright: ignore[reportArgumentType]  # no literal

    return mark
