"""Deprecation of public names and arguments: the replacement, since when, until when."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, getattr_static, signature
from typing import Any, Protocol, TypeVar, cast

from typing_extensions import deprecated as with_warning

T = TypeVar("T", bound=Callable[..., object])  # a function or a class
Method = TypeVar("Method", bound=Callable[..., Any])
SINCE, REMOVED_IN = "0.2.0", "1.0.0"  # of the old names of arguments


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


def written(arguments: Mapping[str, Any]) -> str:
    """Return arguments as a call has them.

    >>> written({"monitor": "valid/loss", "mode": "min"})
    "monitor='valid/loss', mode='min'"
    """
    return ", ".join(
        f"{name}={value!r}" if value is None or isinstance(value, str | int | float) else f"{name}=..."
        for name, value in arguments.items()
    )


def refuse_both(owner: str, old: Iterable[str], given: Mapping[str, Any], new: Iterable[str]) -> None:
    """Raise if arguments are given under their old and their new names.

    Raises:
        ValueError: with both.
    """
    both = [name for name in new if given.get(name) is not None]
    if both:
        raise ValueError(f"{owner}: pass {' and '.join(both)} alone, without the old {' and '.join(old)}")


class OldNames(Protocol):
    """Arguments that have other names today."""

    @property
    def names(self) -> tuple[str, ...]:
        """The old names."""
        ...

    def replace(self, owner: str, given: dict[str, Any]) -> tuple[str, str]:
        """Replace them in the arguments of a call; return what was written and what to write, empty without them.

        Raises:
            ValueError: an argument is given under both names.
        """
        ...


@dataclass(frozen=True)
class Renamed:
    """An argument that has the name `new` today.

    Args:
        values: {old value: today's} if only these values have moved to it; None if the old name is gone.
    """

    old: str
    new: str
    values: Mapping[str, str] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.old,)

    def replace(self, owner: str, given: dict[str, Any]) -> tuple[str, str]:
        value = given.get(self.old)
        new = value
        if self.values is not None:
            new = self.values.get(value) if isinstance(value, str) else None
        if self.old not in given or (self.values is not None and new is None):
            return "", ""
        refuse_both(owner, [self.old], given, [self.new])
        del given[self.old]
        given[self.new] = new
        return written({self.old: value}), written({self.new: given[self.new]})


def accepts_old_names(*renamed: OldNames, by_position: Sequence[str] = ()) -> Callable[[Method], Method]:
    """Decorate a method so that it accepts arguments under old names, with one FutureWarning that says what to write.

    Args:
        renamed: applied in this order.
        by_position: the names that arguments by position had, if not all of them are accepted by position today.
    """

    def decorate(method: Method) -> Method:
        kinds = [each.kind for each in signature(method).parameters.values()]
        num_by_position = sum(kind is Parameter.POSITIONAL_OR_KEYWORD for kind in kinds) - 1  # without self

        @wraps(method)
        def renaming(self: Any, *args: Any, **given: Any) -> Any:
            owner = type(self).__name__ if method.__name__ == "__init__" else method.__name__
            if num_by_position < len(args) <= len(by_position):
                named = dict(zip(by_position, args, strict=False))
                if repeated := sorted(named.keys() & given.keys()):
                    raise TypeError(f"{owner}: got multiple values for the argument {repeated[0]!r}")
                args, given = (), named | given
            pairs = [pair for each in renamed if any(pair := each.replace(owner, given))]
            if pairs:
                old, new = (", ".join(part) for part in zip(*pairs, strict=True))
                warn_of_argument(f"{owner}({old})", instead=new)
            return method(self, *args, **given)

        renaming.old_names = tuple(name for each in renamed for name in each.names)  # type: ignore[attr-defined]
        return cast(Method, renaming)

    return decorate


def formerly_by_position(*names: str) -> Callable[[Method], Method]:
    """Let a method take arguments by position that are keyword-only now, with a warning that says what to write.

    Args:
        names: of these arguments in their former order, after those that still have a position.

    >>> class Difference:
    ...     @formerly_by_position("b", "a")
    ...     def __init__(self, *, a, b):
    ...         self.value = a - b
    >>> Difference(a=3, b=2).value
    1
    """

    def decorate(method: Method) -> Method:
        kinds = [each.kind for each in signature(method).parameters.values()]
        num_by_position = kinds.count(Parameter.POSITIONAL_OR_KEYWORD)  # with self

        @wraps(method)
        def checked(*args: Any, **named: Any) -> Any:
            former = dict(zip(names, args[num_by_position:], strict=False))
            # Any other wrong call raises as it does without this decorator.
            if former and len(args) <= num_by_position + len(names) and not former.keys() & named.keys():
                owner = type(args[0]).__name__ if method.__name__ == "__init__" else method.__name__
                warn_of_argument(f"{owner}: the position of {' and '.join(former)}", instead=written(former))
                args, named = args[:num_by_position], {**former, **named}
            return method(*args, **named)

        return cast(Method, checked)

    return decorate


def warn_of_argument(what: str, *, instead: str) -> None:
    """Warn, at the line of the caller outside of runnerkit, that an argument is deprecated.

    Args:
        what: the argument, with its function or class.
        instead: what to write.
    """
    level, frame = 2, sys._getframe(1)
    while str(frame.f_globals.get("__name__")).startswith("runnerkit.") and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    message = f"{what} is deprecated since {SINCE} and will be removed in {REMOVED_IN}: write {instead}"
    warnings.warn(message, FutureWarning, stacklevel=level)


def old_names(target: Any) -> tuple[str, ...]:
    """Return the old names of arguments that a function, or the constructor of a class, accepts."""
    method = getattr_static(target, "__init__") if isinstance(target, type) else target
    return getattr(method, "old_names", ())
