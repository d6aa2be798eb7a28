"""Checks of the functions that may be passed for an optimizer or a scheduler."""

from __future__ import annotations

from inspect import signature
from typing import Any

from runnerkit.types import as_dict, is_maker


def check_makers(optimizer: Any, scheduler: Any) -> None:
    """Raise if a function passed for an optimizer or a scheduler cannot be called with what it is given.

    Raises:
        TypeError: with its signature.
    """
    for each in filter(is_maker, as_dict(optimizer).values()):
        _check(each, what="optimizer", takes="the model's parameters", num_arguments=1)
    for each in filter(is_maker, as_dict(scheduler).values()):
        _check(each, what="scheduler", takes="the optimizer and the number of steps", num_arguments=2)


def _check(maker: Any, *, what: str, takes: str, num_arguments: int) -> None:
    try:
        parameters = signature(maker)
    except ValueError:  # a built-in function that does not tell
        return
    try:
        parameters.bind(*[None] * num_arguments)
    except TypeError:
        raise TypeError(f"{what}= is a function {parameters}, but is called with {takes}") from None


def check_made(made: Any, *, what: str) -> None:
    """Raise if a function that was passed for an optimizer or a scheduler returned something else.

    Raises:
        TypeError: with what it returned.
    """
    for each in as_dict(made).values():
        if not hasattr(each, "step"):
            raise TypeError(f"the function passed as {what}= returned {type(each).__name__}; it must return the {what}")
