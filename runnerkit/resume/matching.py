"""State of a checkpoint matched to the objects of a run by name, whatever the order in which these were made."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from torch import nn

from runnerkit.callback import ICallback, innermost
from runnerkit.checkpoints.weights import listed
from runnerkit.types import StateDict, as_dict, groups_of

Names = list[list[str]]  # of the parameters in each group of an optimizer; "" if they belong to no module


def parameter_names(optimizers: Any, parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, Names]:
    """Return the names of each optimizer's parameters, by its key.

    Args:
        parameters: all that train with their names, a tied one under each of them.
    """
    known: dict[int, str] = {}
    for name, parameter in parameters:
        # Of a tied parameter the first name in the alphabet: the order in which modules were made may change.
        known[id(parameter)] = min(name, known.get(id(parameter), name))
    return {
        key: [[known.get(id(each), "") for each in group["params"]] for group in groups_of(optimizer)]
        for key, optimizer in as_dict(optimizers).items()
    }


def in_order(saved: StateDict, names: Names, own: Names, source: str) -> StateDict:
    """Return an optimizer's saved state with its parameters in the order of the run's optimizer.

    Args:
        saved: the optimizer's ``state_dict``, whose groups are as large as those of the run.
        names, own: of the saved parameters, and of the run's.
    Raises:
        ValueError: a group holds other parameters; the message names them.
    """
    if names == own:
        return saved
    groups = []
    for number, (group, theirs, mine) in enumerate(zip(saved["param_groups"], names, own, strict=True)):
        if sorted(theirs) != sorted(mine):
            moved = sorted({*theirs} - {*mine}) + sorted({*mine} - {*theirs})
            raise ValueError(
                f"{source} holds an optimizer whose group {number} has other parameters than the run's: "
                f"{listed(moved, 5)}; make the groups as before"
            )
        places: dict[str, list[Any]] = {}
        for name, place in zip(theirs, group["params"], strict=True):
            places.setdefault(name, []).append(place)  # those without a name keep their order
        groups.append({**group, "params": [places[name].pop(0) for name in mine]})
    return {**saved, "param_groups": groups}


def identity_of(callback: ICallback) -> list[str]:
    """Return what tells a callback from others of its class: what it watches and what it computes."""
    inner: Any = innermost(callback)
    watched = [f"{loader}/{metric}" for loader, metric in inner.requires]
    direction = [f"minimize={inner.minimize}"] if watched and hasattr(inner, "minimize") else []
    return [type(inner).__name__, *watched, *direction, *inner.provides]


def settings_of(callback: ICallback) -> str:
    """Return a digest of the plain values that a callback keeps under the names of its arguments.

    It tells two that are alike apart. The values stay out of checkpoints, because one may be a password.
    """
    inner: Any = innermost(callback)
    values = {name: getattr(inner, name, None) for name in inspect.signature(type(inner)).parameters}
    plain = [(name, str(value)) for name, value in values.items() if isinstance(value, str | int | float | PurePath)]
    return hashlib.sha256(repr(plain).encode()).hexdigest()


def callback_states(
    callbacks: Mapping[str, ICallback],
    saved: Mapping[str, StateDict],
    identities: Mapping[str, Sequence[str]],
    settings: Mapping[str, str],
) -> dict[str, StateDict]:
    """Return the saved state of each callback that has one: that of the callback with the same class that watches the
    same. Of several, it is the one with the same settings, else the one under its key.

    Args:
        identities, settings: of the saved callbacks, by key; absent for those of an earlier version, which are matched
            by key.
    """
    found, left = {}, dict(saved)
    own = {key: (identity_of(each), settings_of(each)) for key, each in callbacks.items()}

    def is_alike(key: str, other: str) -> bool:
        return [*identities.get(other, own[key][0] if key == other else ())] == own[key][0]

    def is_set_alike(key: str, other: str) -> bool:
        return settings.get(other) == own[key][1]

    rules: list[Callable[[str, str], bool]] = [
        lambda key, other: key == other and is_set_alike(key, other),
        is_set_alike,
        lambda key, other: key == other,
        lambda key, other: True,
    ]
    for fits in rules:
        for key in [key for key in callbacks if key not in found]:
            other = next((other for other in left if is_alike(key, other) and fits(key, other)), None)
            if other is not None:
                found[key] = left.pop(other)
    return found
