"""What a run leaves in the process that called it, wherever the work was done."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

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
    "_step_queue", "_known_callbacks", "_snapshot", "_listeners", "_evaluation", "_logdirs",
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
        attributes = {
            name: value for name, value in self.attributes.items() if name in _COMPONENTS or _can_travel(name, value)
        }
        return {"attributes": attributes}


def _can_travel(name: str, value: Any) -> bool:
    try:
        pickling.dumps(value)
    except Exception as error:  # whatever the user keeps there; the run's result is worth more
        logger.warning("runner.%s stays in the process that trained: %s", name, error)
        return False
    return True


def capture(runner: IRunner) -> Outcome:
    """Take what :func:`adopt` gives to the calling process."""
    return Outcome({name: value for name, value in vars(runner).items() if name not in _STAYS})


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
