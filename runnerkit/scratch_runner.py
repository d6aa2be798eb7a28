"""A copy of a runner to try things on: what the user keeps on it, and in callbacks, stays as it was."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from runnerkit.callback import ICallback
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)


def scratch_copy(runner: IRunner, *, callbacks: Collection[ICallback]) -> IRunner:
    """Copy `runner` with all meters, lists and counters that the user keeps there; weights, data, loggers are shared.

    Shared is also what cannot be copied (an open file, a lock), and what the user's code reaches by other ways than the
    runner: a variable of its module, say.

    Args:
        runner: not changed.
        callbacks: those of the runner that are copied too.
    """
    scratch = copy.copy(runner)
    memo: dict[int, Any] = {id(each): each for each in _shared(runner, callbacks)}
    memo[id(runner)] = scratch
    for name, value in vars(runner).items():
        parts = type(value) is dict  # one callback that cannot be copied does not keep the others from it
        made = {key: _copied(each, memo, name) for key, each in value.items()} if parts else _copied(value, memo, name)
        vars(scratch)[name] = made
    return scratch


def _shared(runner: IRunner, callbacks: Collection[ICallback]) -> Iterator[Any]:
    yield from (runner.engine, runner.loader, runner.batch, runner._evaluation, runner._snapshot, runner._step_watch)
    given: Mapping[str, Any] | None = getattr(runner, "_loaders", None)
    for components in (runner.loaders, given or {}, runner.loggers, as_dict(runner.scheduler)):
        yield from components.values()
    for modules in (runner.model, runner._training_model, runner.criterion):
        for each in as_dict(modules).values():
            if isinstance(each, nn.Module):
                yield from each.modules()
    yield from (each for each in runner.callbacks.values() if not any(each is other for other in callbacks))
    attributes = (kept for holder in (runner, *callbacks) for kept in vars(holder).values())
    for value in (each for kept in attributes if kept is not runner.loader for each in _items(kept)):
        if isinstance(value, Dataset | DataLoader | Optimizer):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()  # a teacher's weights; what a torchmetrics object sums up is none


def _items(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list | tuple) else (value,)


def _copied(value: Any, memo: dict[int, Any], name: str) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:  # whatever the user keeps there
        logger.debug("runner.%s is shared with the runner's copy: %s", name, error)
        return value
