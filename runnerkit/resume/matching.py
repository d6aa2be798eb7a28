"""State of a checkpoint matched to the objects of a run by name, whatever the order in which these were made."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from runnerkit.callback import ICallback, innermost
from runnerkit.checkpoints.weights import listed
from runnerkit.types import StateDict, as_dict, groups_of

logger = logging.getLogger(__name__)

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


def callback_states(
    callbacks: Mapping[str, ICallback], saved: Mapping[str, StateDict], identities: Mapping[str, Sequence[str]]
) -> dict[str, StateDict]:
    """Return the saved state of each callback that has one: that under its key, or, if another one has that key now,
    that of the callback with the same class that watches the same.

    Args:
        identities: of the saved callbacks, by key; absent for those of an earlier version, which are matched by key.
    """
    found, left = {}, dict(saved)
    for key in callbacks:
        if key in left and [*identities.get(key, identity_of(callbacks[key]))] == identity_of(callbacks[key]):
            found[key] = left.pop(key)
    for key, callback in callbacks.items():
        alike = [other for other in left if [*identities.get(other, ())] == identity_of(callback)]
        if key not in found and alike:
            found[key] = left.pop(alike[0])
    return found
