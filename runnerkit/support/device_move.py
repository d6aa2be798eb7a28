"""The move of a batch to a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from copy import copy, deepcopy
from dataclasses import is_dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from runnerkit.support.members import field_values
from runnerkit.support.plain_values import attributes_of

_PLAIN = (str, bytes, int, float, type(None))


def move(value: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Move tensors, and objects with a method ``to``, to `device`; see :meth:`IEngine.to_device`.

    Containers keep their type and everything else that they hold. Those that can be changed are copied, so that the
    user may change the result; anything unknown is returned as it is.

    Args:
        channels_last: store 4-dimensional float tensors as (N, H, W, C) in memory; their shape does not change.
    """
    if isinstance(value, Tensor) and channels_last and value.ndim == 4 and value.is_floating_point():
        return value.to(device, non_blocking=True, memory_format=torch.channels_last)
    if isinstance(value, Tensor):
        # Without pinned memory non_blocking is ignored; with it, the copy overlaps with earlier work.
        return value.to(device, non_blocking=True)
    kind: Any = type(value)
    if callable(getattr(kind, "to", None)):
        moved = value.to(device, non_blocking=True) if _takes_non_blocking(kind) else value.to(device)
        return value if moved is None else moved
    if type(value) is dict:
        return {key: move(item, device, channels_last=channels_last) for key, item in value.items()}
    if type(value) is list:
        return [move(item, device, channels_last=channels_last) for item in value]
    if isinstance(value, _PLAIN):
        return value
    return rebuilt(value, partial(move, device=device, channels_last=channels_last))


@cache
def _takes_non_blocking(kind: type[Any]) -> bool:
    """Return whether the method `to` of a user's class takes the argument; one that cannot be inspected does."""
    try:
        parameters = signature(kind.to).parameters
    except (TypeError, ValueError):
        return True
    return "non_blocking" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())


def copied(value: Any) -> Any:
    """Copy the tensors and arrays of a batch, which its loader may overwrite, and objects with a method ``to``.

    >>> buffer = torch.zeros(1)
    >>> batch = copied({"features": [buffer], "name": "a"})
    >>> buffer += 1
    >>> batch
    {'features': [tensor([0.])], 'name': 'a'}
    """
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, np.ndarray) or callable(getattr(type(value), "to", None)):
        return deepcopy(value)
    return value if isinstance(value, _PLAIN) else rebuilt(value, copied)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container of the type of `value` whose items are changed; anything else as it is.

    >>> rebuilt((1, 2), str), rebuilt("a", str)
    (('1', '2'), 'a')
    """
    kind = cast(Any, type(value))
    if isinstance(value, tuple | frozenset):
        return same_kind(value, [change(item) for item in value])
    if isinstance(value, list | deque | MutableMapping):
        parts = value.items() if isinstance(value, MutableMapping) else enumerate(value)
        return _with_items(value, {key: change(item) for key, item in parts})
    if isinstance(value, set):
        return kind(map(change, value))
    if isinstance(value, Mapping):
        return kind({key: change(item) for key, item in value.items()})
    if not is_container(value):
        return value
    moved = copy(value)  # a dataclass; unlike the constructor, it computes nothing again
    for name, held in field_values(value):
        object.__setattr__(moved, name, change(held))
    return moved


def is_container(value: Any) -> bool:
    """Return whether `value` is a tuple, a list, a set, a mapping, or a dataclass.

    >>> is_container((1, 2)), is_container({}), is_container("ab")
    (True, True, False)
    """
    if isinstance(value, tuple | list | deque | set | frozenset | Mapping):
        return True
    return is_dataclass(value) and not isinstance(value, type)


def same_kind(value: Any, items: list[Any]) -> Any:
    """Return a tuple or a frozen set of the type of `value` with these items; itself if they are its own."""
    kind: Any = type(value)
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if not isinstance(value, tuple):
        return kind(items)
    made = tuple.__new__(kind, items)  # not by the constructor, whose arguments may be others, as those of namedtuple
    if attributes := attributes_of(value):
        vars(made).update(attributes)
    return made


def _with_items(value: Any, items: Mapping[Any, Any]) -> Any:
    """Return a copy of a list, deque or mapping of any class with other items at the same places."""
    kind: Any = type(value)
    base: Any = next((each for each in (dict, list) if isinstance(value, each)), kind)
    try:
        made = copy(value)
    except (KeyError, TypeError):  # a __getattr__ that answers for the names of methods that `copy` looks for
        made = kind.__new__(kind)
        base.__init__(made, value)
        vars(made).update(vars(value))
    for key, item in items.items():
        if item is not value[key]:
            base.__setitem__(made, key, item)  # not one of the user's that converts what is set
    return made
