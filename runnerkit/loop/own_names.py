"""Checks of classes of runners: they do not use the names of the runner's own state, and initialize it."""

from __future__ import annotations

from functools import cache
from operator import attrgetter
from types import FunctionType
from typing import Any

_LIBRARY = "runnerkit."


class OwnAttribute(property):
    """An attribute that only the runner writes, under its private name; it is read without a Python function call.

    Args:
        name: without the underscore.
    """

    def __init__(self, name: str) -> None:
        def refuse(runner: Any, value: Any) -> None:
            raise AttributeError(
                f"{type(runner).__name__}.{name} is the runner's own attribute, which a run needs: choose another name "
                f"for the {type(value).__name__}"
            )

        super().__init__(attrgetter(f"_{name}"), refuse)


def check_names(cls: type, base: type) -> None:
    """Raise if a class, or a base that is not a runner, defines a name that the runner itself uses.

    Hooks, events and public methods may be overridden, and properties that are not final, such as `stages`.

    Args:
        cls: a subclass of `base`.
        base: IRunner.
    Raises:
        TypeError: with the name.
    """
    if cls.__module__.startswith(_LIBRARY):
        return
    data, properties, private = _names_of(base)
    for part in cls.__mro__[: cls.__mro__.index(base)]:
        if part is not cls and issubclass(part, base):
            continue  # checked when it was made
        for name, value in vars(part).items():
            is_plain = not hasattr(value, "__get__")  # not a method
            if name in data:
                other = f"set it as self.{name} in __init__, or to train()" if is_plain else "choose another name"
                raise TypeError(f"{cls.__name__}.{name} replaces the runner's own attribute {name!r}: {other}")
            if name in properties and isinstance(value, FunctionType):
                raise TypeError(f"{cls.__name__}.{name} replaces a property of the runner: decorate it with @property")
            if name in private:
                raise TypeError(f"{cls.__name__}.{name} replaces a method of the runner itself: choose another name")


def check_initialized(runner: Any) -> None:
    """Raise if the ``__init__`` of a class of runners did not call the one that it replaces.

    Raises:
        TypeError: with the class.
    """
    if "_current_run" not in vars(runner):
        raise TypeError(f"{type(runner).__name__}.__init__ must call super().__init__() before the runner is used")


@cache
def _names_of(base: Any) -> tuple[set[str], set[str], set[str]]:
    """Return the names of what a runner sets or computes, of properties that may be overridden, of private methods."""
    holder: Any = type("Holder", (), {"_reset": base._reset})()  # the class itself is abstract
    base.__init__(holder)
    properties = {name: value for name, value in vars(base).items() if isinstance(value, property)}
    computed = {
        name
        for name, value in properties.items()
        if isinstance(value, OwnAttribute) or getattr(value.fget, "__final__", False)
    }
    private = {name for name, value in vars(base).items() if isinstance(value, FunctionType) and name[0] == "_"}
    private = {each for each in private if each[1] != "_" and each[-1] != "_"}  # _repr_html_ may be overridden
    return vars(holder).keys() | computed, properties.keys() - computed, private
