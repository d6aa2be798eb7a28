"""Members that an object of the user's or of another library may lack, listed once for each kind of object.

A list of members is a class. Its objects read those of one object, each when it is asked for:

>>> class LoaderMembers(Members):
...     num_workers = Member(0)
>>> LoaderMembers([1, 2]).num_workers
0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_UNSET = object()


class Members:
    """Base class of lists of members.

    Args:
        of: the object whose members are read.
    """

    def __init__(self, of: Any) -> None:
        self.of = of


class Member(Generic[T]):
    """A member that some objects of a kind lack.

    Args:
        default: its value for an object that lacks it.
        name: its name in the object, if that is not the one in the list.
    """

    def __init__(self, default: T, *, name: str | None = None) -> None:
        self.default = default
        self.name = name or ""

    def __set_name__(self, owner: type[Members], name: str) -> None:
        self.name = self.name or name

    def __get__(self, members: Members, owner: type[Members]) -> T:
        value: T = getattr(members.of, self.name, self.default)
        return value


def field_values(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield names and values of a dataclass's fields, unlike ``asdict`` as they are; without those never set.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     height: int
    ...     width: int
    >>> dict(field_values(Size(2, 3)))
    {'height': 2, 'width': 3}
    """
    for name in (each.name for each in fields(value)):
        if (held := getattr(value, name, _UNSET)) is not _UNSET:
            yield name, held


def overrides(value: object, base: type, method: str) -> bool:
    """Return whether the class of `value` has a `method` other than that of `base`.

    >>> overrides(True, int, "__and__"), overrides(True, int, "__add__")
    (True, False)
    """
    return getattr(type(value), method) is not getattr(base, method)
