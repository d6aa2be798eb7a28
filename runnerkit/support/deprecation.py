"""Deprecation of arguments: the replacement, since when, until when."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from inspect import Parameter, getattr_static, signature
from typing import Any, Protocol, TypeVar, cast

Method = TypeVar("Method", bound=Callable[..., Any])
SINCE, REMOVED_IN = "0.2.0", "1.0.0"  # of the old names of arguments
NOTHING = "nothing, as it does nothing without a metric"


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

    def replace(self, owner: str, given: dict[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """Replace them in the arguments of a call; return those that were given, and what to write instead of them.

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

    def replace(self, owner: str, given: dict[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        value = new = given.get(self.old)
        if self.values is not None:
            new = self.values.get(value) if isinstance(value, str) else None
        elif value is None:
            given.pop(self.old, None)  # as if it were absent
        if new is None:
            return {}, {}
        refuse_both(owner, [self.old], given, [self.new])
        del given[self.old]
        given[self.new] = new
        return {self.old: value}, {self.new: new}


def accepts_old_names(*renamed: OldNames, by_position: Sequence[str] = ()) -> Callable[[Method], Method]:
    """Decorate a method so that it accepts arguments as they were written before, with a warning of what to write.

    Args:
        renamed: those that have other names today; applied in this order.
        by_position: names, old or today's, that arguments by position had, after those that still have a position.

    >>> class Difference:
    ...     @accepts_old_names(by_position=("b", "a"))
    ...     def __init__(self, *, a, b):
    ...         self.value = a - b
    >>> Difference(a=3, b=2).value
    1
    """
    old = tuple(name for each in renamed for name in each.names)

    def decorate(method: Method) -> Method:
        kinds = [each.kind for each in signature(method).parameters.values()]
        num_by_position = kinds.count(Parameter.POSITIONAL_OR_KEYWORD) - 1  # without self

        @wraps(method)
        def renaming(self: Any, *args: Any, **given: Any) -> Any:
            owner = type(self).__name__ if method.__name__ == "__init__" else method.__name__
            former: dict[str, Any] = {}
            if len(args) <= num_by_position + len(by_position):  # else the call raises as without this decorator
                former = dict(zip(by_position, args[num_by_position:], strict=False))
            if former:
                if repeated := sorted(former.keys() & given.keys()):
                    raise TypeError(f"{owner}: got multiple values for the argument {repeated[0]!r}: pass it by name")
                args, given = args[:num_by_position], former | given
            before, today = replace_old_names(renamed, owner, given)
            if before:
                warn_of_argument(f"{owner}({written(before)})", instead=written(today) or NOTHING)
            elif moved := {name: value for name, value in former.items() if name not in old}:
                warn_of_argument(f"{owner}: the position of {' and '.join(moved)}", instead=written(moved))
            return method(self, *args, **given)

        renaming.renamed = renamed  # type: ignore[attr-defined]
        return cast(Method, renaming)

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


def renamed_arguments(target: Any) -> tuple[OldNames, ...]:
    """Return the arguments that a function, or the constructor of a class, accepts under old names."""
    method = getattr_static(target, "__init__") if isinstance(target, type) else target
    return getattr(method, "renamed", ())


def old_names(target: Any) -> tuple[str, ...]:
    """Return the old names of arguments that a function, or the constructor of a class, accepts."""
    return tuple(name for each in renamed_arguments(target) for name in each.names)


def replace_old_names(
    renamed: Iterable[OldNames], owner: str, given: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Replace old names in the arguments of a call; return those that were given, and what to write instead of them.

    Raises:
        TypeError, ValueError: an argument is invalid, or given under both names.
    """
    old, new = dict[str, Any](), dict[str, Any]()
    for each in renamed:
        its_old, its_new = each.replace(owner, given)
        old |= its_old
        new |= its_new
    return old, new
