"""Checks that a model, a criterion and an optimizer are what they should be; errors say what to write instead."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from runnerkit.errors import nearest_name
from runnerkit.types import as_dict, has_step


def check_components(*, model: Any = None, criterion: Any = None, optimizer: Any = None) -> None:
    """Raise unless the components are modules, functions of losses, and optimizers or functions that make them.

    Raises:
        TypeError: with the argument and what to write.
    """
    for name, given in (("model", model), ("criterion", criterion), ("optimizer", optimizer)):
        for key, each in as_dict(given).items():
            argument = f"{name}[{key!r}]" if key else name
            if isinstance(each, type):
                raise TypeError(
                    f"{argument} is the class {each.__name__}; pass an instance of it: {each.__name__}(...)"
                )
            if isinstance(each, list | tuple):
                raise TypeError(f"{argument} is a {type(each).__name__}; pass several as a dict with a name for each")
            if each is not None and not _IS[name](each):
                raise TypeError(f"{argument} is {_shown(each)}, not {_WANTED[name]}; {_hint(name, each)}")


def check_made_model(model: Any) -> None:
    """Raise unless the hook has returned a module, or several by key.

    Raises:
        TypeError: with what it has returned.
    """
    if not as_dict(model):
        raise TypeError(f"get_model returned {model!r}: return the model, or several in a dict")
    check_components(model=model)


def _is_optimizer(value: Any) -> bool:
    # A scheduler has a step too, and a module can be called, but does not make an optimizer.
    return not isinstance(value, nn.Module | LRScheduler) and (has_step(value) or callable(value))


def _is_model(value: Any) -> bool:
    return isinstance(value, nn.Module)


_IS: dict[str, Callable[[Any], bool]] = {"model": _is_model, "criterion": callable, "optimizer": _is_optimizer}
_WANTED = {"model": "an nn.Module", "criterion": "a loss", "optimizer": "an optimizer"}


def _shown(value: Any) -> str:
    return f"{value!r}" if isinstance(value, str | float | int) else f"a {type(value).__name__}"


def _hint(name: str, value: Any) -> str:
    if name == "model":
        return "create it before: model=MyModel(...)"
    if name == "criterion":
        loss = _nearest(value, {each.removesuffix("Loss"): each for each in dir(nn) if each.endswith("Loss")})
        return f"pass a module or a function, such as criterion=torch.nn.{loss or 'CrossEntropyLoss'}()"
    kinds = [name for name, _ in inspect.getmembers(torch.optim, inspect.isclass)]
    kind = _nearest(value, {each: each for each in kinds if each != "Optimizer"})
    return f"pass for example optimizer=torch.optim.{kind or 'Adam'}(model.parameters(), lr=0.001)"


def _nearest(value: Any, names: dict[str, str]) -> str | None:
    """Return the name in torch whose key resembles a text such as "cross_entropy" or "adam"."""
    if not isinstance(value, str):
        return None
    text = value.lower().replace("_", "").removesuffix("loss")
    nearest = nearest_name(text, names) if len(text) > 2 else None  # "ce" resembles CTCLoss
    return None if nearest is None else names[nearest]
