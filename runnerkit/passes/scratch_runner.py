"""A copy of a runner to experiment with; the user's attributes of the runner and its callbacks do not change."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from runnerkit.callback import ICallback
from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.loader_pass import Pass
from runnerkit.steps.gradient_step import GradientStep
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


def scratch_copy(runner: IRunner, *, callbacks: Collection[ICallback]) -> IRunner:
    """Copy `runner` with all meters, lists and counters in its attributes; weights, data and loggers are shared.

    Objects that cannot be copied, such as open files and locks, are shared too, and so is everything that the user's
    code does not reach through the runner, for example global variables.

    Args:
        runner: not changed.
        callbacks: callbacks of the runner to copy.
    """
    scratch = copy.copy(runner)
    memo: dict[int, Any] = {id(each): each for each in _shared(runner, callbacks)}
    memo[id(runner)] = scratch
    step = GradientStep(copy.deepcopy(runner.gradient_step.units, memo))
    memo |= {id(runner.loader_pass): Pass(gradient_step=step), id(runner.gradient_step): step}  # a pass of its own
    for name, value in vars(runner).items():
        parts = type(value) is dict  # a callback that cannot be copied does not prevent copies of the others
        made = {key: _copied(each, memo, name) for key, each in value.items()} if parts else _copied(value, memo, name)
        vars(scratch)[name] = made
    return scratch


def _shared(runner: IRunner, callbacks: Collection[ICallback]) -> Iterator[Any]:
    yield from (runner.engine, runner.loader, runner.batch)
    states = (each for each in vars(runner).values() if isinstance(each, ProcessState))
    yield from (each for each in states if each.is_shared_by_scratch_copies)
    for components in (runner.loaders, runner.loggers, as_dict(runner.scheduler)):
        yield from components.values()
    for modules in (runner.model, runner.current_run.stage.training_model, runner.criterion):
        for each in as_dict(modules).values():
            if isinstance(each, nn.Module):
                yield from each.modules()
    yield from (each for each in runner.callbacks.values() if not any(each is other for other in callbacks))
    attributes = (kept for holder in (runner, *callbacks) for kept in vars(holder).values())
    for value in (each for kept in attributes if kept is not runner.loader for each in _items(kept)):
        if isinstance(value, Dataset | DataLoader | Optimizer | Pass | GradientStep):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()  # a teacher's weights, but not the states of a torchmetrics object


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _copied(value: Any, memo: dict[int, Any], name: str) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # any object of the user
        logger.debug("runner.%s is shared with the runner's copy: %s", name, error)
        return value
