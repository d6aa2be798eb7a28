"""Deprecation of single arguments: an old name, or a position that became a name."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import Any, TypeVar, cast

T = TypeVar("T", bound=Callable[..., Any])


def warn_of_argument(what: str, *, instead: str, since: str, removed_in: str) -> None:
    """Warn, at the line of the caller outside of runnerkit, that an argument is deprecated.

    Args:
        what: the argument, with its function or class.
        instead: what to write.
        since, removed_in: as in :func:`.deprecation.deprecated`.
    """
    level, frame = 2, sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith("runnerkit.") and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    message = f"{what} is deprecated since {since} and will be removed in {removed_in}: write {instead}"
    warnings.warn(message, FutureWarning, stacklevel=level)


def formerly_by_position(*names: str, since: str, removed_in: str) -> Callable[[T], T]:
    """Let a method take arguments by position that are keyword-only now, with a warning that says what to write.

    Args:
        names: of these arguments in their former order, after those that still have a position.
        since, removed_in: as in :func:`.deprecation.deprecated`.

    >>> class Difference:
    ...     @formerly_by_position("b", "a", since="0.1.0", removed_in="999.0.0")
    ...     def __init__(self, *, a, b):
    ...         self.value = a - b
    >>> Difference(a=3, b=2).value
    1
    """

    def decorate(method: T) -> T:
        kinds = [each.kind for each in signature(method).parameters.values()]
        num_by_position = kinds.count(Parameter.POSITIONAL_OR_KEYWORD)  # with self

        @wraps(method)
        def checked(*args: Any, **named: Any) -> Any:
            former = dict(zip(names, args[num_by_position:], strict=False))
            # Any other wrong call raises as it does without this decorator.
            if former and len(args) <= num_by_position + len(names) and not former.keys() & named.keys():
                owner = type(args[0]).__name__ if method.__name__ == "__init__" else method.__name__
                written = ", ".join(f"{name}={_shown(value)}" for name, value in former.items())
                what = f"{owner}: the position of {' and '.join(former)}"
                warn_of_argument(what, instead=written, since=since, removed_in=removed_in)
                args, named = args[:num_by_position], {**former, **named}
            return method(*args, **named)

        return cast(T, checked)

    return decorate


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str | int | float) else "..."
