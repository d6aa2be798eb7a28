"""What a run leaves in the process that called it, wherever the work was done."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import cloudpickle
from torch import nn

from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

Outcome = dict[str, Any]

# What belongs to the process that worked, or is of no use after the run.
_STAYS = {
    "engine", "loaders", "loader", "loggers", "batch", "exception", "_given_engine", "_training_model", "_means",
    "_step_queue", "_known_callbacks", "_snapshot", "_listeners",
}  # fmt: skip
_COMPONENTS = ("model", "criterion", "optimizer", "scheduler")


def capture(runner: IRunner) -> Outcome:
    """Take the runner's attributes: components, metrics, counters, callbacks, and the user's own."""
    return {name: value for name, value in vars(runner).items() if name not in _STAYS}


def portable(outcome: Outcome) -> Outcome:
    """Make an outcome fit to leave its process: on the CPU, and without the user's attributes that cannot travel."""
    for component in [*as_dict(outcome["model"]).values(), *as_dict(outcome["criterion"]).values()]:
        if isinstance(component, nn.Module):
            component.cpu()
    return {name: value for name, value in outcome.items() if name in _COMPONENTS or _can_travel(name, value)}


def _can_travel(name: str, value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception as error:
        logger.warning("runner.%s stays in the process that trained: %s", name, error)
        return False
    return True


def adopt(runner: IRunner, outcome: Outcome) -> None:
    """Give the calling process's runner what the run left; objects that the user passed in are updated in place."""
    for name in _COMPONENTS:
        mine, theirs = as_dict(getattr(runner, name)), as_dict(outcome.get(name))
        for key in mine.keys() & theirs.keys():
            if mine[key] is not theirs[key] and hasattr(mine[key], "load_state_dict"):
                mine[key].load_state_dict(theirs[key].state_dict())
        if not mine:
            setattr(runner, name, outcome.get(name))
    for key, callback in outcome.get("callbacks", {}).items():
        if key in runner.callbacks and runner.callbacks[key] is not callback:
            vars(runner.callbacks[key]).update(vars(callback))
            outcome["callbacks"][key] = runner.callbacks[key]
    vars(runner).update({name: value for name, value in outcome.items() if name not in _COMPONENTS})
