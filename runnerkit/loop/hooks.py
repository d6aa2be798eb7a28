"""Calls of a runner's hooks, which users declare with and without the stage, and in either order."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def call_hook(hook: Callable[..., Any], **given: Any) -> Any:
    """Call a hook with those of the `given` arguments that it takes.

    Arguments go to the parameters of their names; the others, in order, to parameters of other names. A hook with fewer
    parameters than `given` does without the first ones: ``get_optimizer(self, net)`` gets the model, not the stage.

    Args:
        hook: a bound method, such as ``runner.get_optimizer``.
        given: the arguments by name, in the order in which runnerkit declares them.

    Raises:
        TypeError: the hook requires more parameters.

    >>> call_hook(lambda model, stage: (model, stage), stage="train", model="m")
    ('m', 'train')
    >>> call_hook(lambda net: net, stage="train", model="m"), call_hook(lambda: "all", stage="train")
    ('m', 'all')
    >>> call_hook(lambda **given: given, stage="train", model="m")
    {'stage': 'train', 'model': 'm'}
    """
    signature = inspect.signature(hook)
    kinds = {each.kind for each in signature.parameters.values()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # a wrapper, or a mock
        return hook(*given.values())
    others = [
        name
        for name, each in signature.parameters.items()
        if name not in given and each.default is each.empty and each.kind is not each.VAR_KEYWORD
    ]
    left = [value for name, value in given.items() if name not in signature.parameters]
    if len(others) > len(left):
        name = getattr(hook, "__qualname__", type(hook).__name__)
        raise TypeError(f"{name}{signature}: this hook gets {' and '.join(given)}, and may leave any of them out")
    values = given | dict(zip(others, left[len(left) - len(others) :], strict=True))
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds and not others
    return hook(**{name: value for name, value in values.items() if takes_all or name in signature.parameters})
