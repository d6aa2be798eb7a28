"""Members of functions and methods that other callables lack."""

from __future__ import annotations

from types import CodeType
from typing import Any

from runnerkit.support.members import Member, Members


class FunctionMembers(Members):
    """Members of functions and methods.

    Attributes:
        owner, function: what a method is bound to, and its function.
        code, closure: of a function that is written in Python.
        own_name: its name; also classes and modules have one.

    >>> FunctionMembers([].append).owner, FunctionMembers(len).code
    ([], None)
    """

    owner = Member[Any](None, name="__self__")
    function = Member[Any](None, name="__func__")
    code = Member[CodeType | None](None, name="__code__")
    closure = Member[tuple[Any, ...] | None](None, name="__closure__")
    own_name = Member[str | None](None, name="__name__")
