"""Functions that may be passed for an optimizer or a scheduler: they are checked and called."""

from __future__ import annotations

from inspect import signature
from typing import Any

from runnerkit.errors import UnknownKeyError
from runnerkit.types import Optimizers, Scheduler, as_dict, has_step, is_maker, like


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


def make_optimizers(given: Any, model: Any) -> Optimizers | None:
    """Return optimizers, those passed as functions made for the model of their key, or else for all models.

    Raises:
        TypeError: a function returned something else.
    """
    models = as_dict(model)

    def parameters(key: str) -> list[Any]:
        own = [models[key]] if key in models else models.values()  # one optimizer may train several models
        return [parameter for each in own for parameter in each.parameters()]

    made = {key: each(parameters(key)) if is_maker(each) else each for key, each in as_dict(given).items()}
    if any(map(is_maker, as_dict(given).values())):
        _check_made(made, what="optimizer")
    optimizers: Optimizers | None = like(given, made)
    return optimizers


def make_schedulers(given: Any, optimizer: Any, num_steps: int | None) -> Scheduler | None:
    """Return schedulers, those passed as functions made for the optimizer of their key and the number of steps.

    Raises:
        KeyError: `given` has a key that is not one of an optimizer.
        TypeError: a function returned something else.
    """
    by_key, optimizers = as_dict(given), as_dict(optimizer)
    if not any(map(is_maker, by_key.values())):
        return given
    missing = sorted(by_key.keys() - optimizers.keys())
    if missing:
        name = f"scheduler {missing[0]!r}" if missing[0] else "scheduler="
        raise UnknownKeyError(
            f"{name} is a function of one optimizer, and the run has {sorted(optimizers)}: pass a dict by their keys"
        )
    made = {key: each(optimizers[key], num_steps) if is_maker(each) else each for key, each in by_key.items()}
    _check_made(made, what="scheduler")
    return like(given, made)


def _check_made(made: Any, *, what: str) -> None:
    """Raise if a function that was passed for an optimizer or a scheduler returned something else.

    Raises:
        TypeError: with what it returned.
    """
    for each in as_dict(made).values():
        if not has_step(each):
            raise TypeError(f"the function passed as {what}= returned {type(each).__name__}; it must return the {what}")
