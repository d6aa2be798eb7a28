"""What a run leaves in the process that called it, wherever the work was done."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from runnerkit import pickling
from runnerkit.engine import move
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

# What belongs to the process that worked, or is of no use after the run.
_STAYS = {
    "engine", "loaders", "loader", "loggers", "batch", "exception", "_loaders", "_given_engine", "_given_criterion",
    "_given_optimizer", "_given_scheduler", "_given_callbacks", "_given_loggers", "_training_model", "_means",
    "_step_queue", "_known_callbacks", "_snapshot", "_listeners", "_evaluation", "_logdirs", "_step_watch",
    "_checked_batch_sizes", "_compared_streams",
}  # fmt: skip
_COMPONENTS = ("model", "criterion", "optimizer", "scheduler")


@dataclass
class Outcome:
    """Attributes of the runner after its run: components, metrics, counters, callbacks, and the user's own."""

    attributes: dict[str, Any]

    def __getstate__(self) -> dict[str, Any]:
        """Prepare to leave this process: on the CPU, without the user's attributes that cannot travel."""
        for name in ("model", "criterion"):
            for component in as_dict(self.attributes[name]).values():
                if isinstance(component, nn.Module):
                    component.cpu()
        for optimizer in as_dict(self.attributes["optimizer"]).values():
            state = optimizer.state
            for parameter in state:
                state[parameter] = move(state[parameter], torch.device("cpu"), path="state")
        try:
            data = pickling.dumps(self.attributes)  # as a whole: what two of them share stays one
        except Exception:
            data = pickling.dumps(self._travelling())
        return {"data": data}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.attributes = pickling.loads(state["data"])

    def _travelling(self) -> dict[str, Any]:
        components = {name: self.attributes[name] for name in _COMPONENTS}
        callbacks = {
            key: callback if _refusal(callback) is None else _stripped(callback, f"callbacks[{key!r}]")
            for key, callback in self.attributes["callbacks"].items()
        }
        rest = {name: value for name, value in self.attributes.items() if name not in {*_COMPONENTS, "callbacks"}}
        return {**components, "callbacks": callbacks, **_travelling(rest, "")}


def _stripped(callback: Any, name: str) -> Any:
    """Copy a callback without what cannot leave this process: a lock, say."""
    copy = object.__new__(type(callback))
    vars(copy).update(_travelling(vars(callback), f"{name}."))
    return copy


def _travelling(attributes: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Leave out what cannot be pickled, and say so: the run's result is worth more than what the user keeps there."""
    refusals = {name: _refusal(value) for name, value in attributes.items()}
    for name, error in refusals.items():
        if error is not None:
            logger.warning("runner.%s%s stays in the process that trained: %s", prefix, name, error)
    return {name: value for name, value in attributes.items() if refusals[name] is None}


def _refusal(value: Any) -> Exception | None:
    try:
        pickling.dumps(value)
    except Exception as error:
        return error
    return None


def data_of(runner: IRunner) -> dict[str, Any]:
    """List attributes that are data sets or loaders, or dicts of them: the calling process has these, too."""
    return {name: value for name, value in vars(runner).items() if _is_data(value)}


def _is_data(value: Any) -> bool:
    parts = list(value.values()) if isinstance(value, dict) else [value]
    return bool(parts) and all(isinstance(each, Dataset | DataLoader) for each in parts)


def capture(runner: IRunner, *, had: Mapping[str, Any]) -> Outcome:
    """Take what :func:`adopt` gives to the calling process.

    Args:
        had: the runner's :func:`data_of` when the run began; those that are still there stay.
    """
    stays = _STAYS | {name for name, value in had.items() if vars(runner).get(name) is value}
    return Outcome({name: value for name, value in vars(runner).items() if name not in stays})


def adopt(runner: IRunner, outcome: Outcome) -> None:
    """Give the calling process's runner what the run left; objects that the user passed in are updated in place."""
    theirs = dict(outcome.attributes)
    for name in _COMPONENTS:
        _adopt_component(runner, name, theirs.pop(name))
    given = getattr(runner, "_given_callbacks", {})
    for key, callback in theirs["callbacks"].items():
        if key in given and given[key] is not callback:
            vars(given[key]).update(vars(callback))
            theirs["callbacks"][key] = given[key]
    vars(runner).update(theirs)


def _adopt_component(runner: IRunner, name: str, component: Any) -> None:
    mine, theirs = as_dict(getattr(runner, name)), as_dict(component)
    if mine.keys() != theirs.keys():
        setattr(runner, name, component)
        return
    try:
        for key, each in mine.items():
            if each is not theirs[key] and hasattr(each, "load_state_dict"):
                each.load_state_dict(theirs[key].state_dict())
    except (RuntimeError, ValueError, KeyError):
        setattr(runner, name, component)  # a hook made another one than was passed in
