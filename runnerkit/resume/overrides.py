"""Optimizer options and schedules of a resumed run that come from its arguments instead of its checkpoint."""

from __future__ import annotations

import inspect
import warnings
from typing import Any, Literal, TypeAlias

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from runnerkit.errors import did_you_mean
from runnerkit.support.component_members import OptimizerMembers
from runnerkit.support.torch_internals import INNER_SCHEDULERS
from runnerkit.types import StateDict, groups_of
from runnerkit.warmup import WarmupLR

Source: TypeAlias = Literal["checkpoint", "arguments"]

_OPTIONS = {"lr", "betas", "eps", "momentum", "weight_decay"}  # a constructor may have other words for them


def check_source(resume_options: str) -> None:
    """Raise unless `resume_options` is one of its two values.

    Raises:
        ValueError: with both values and their meaning.
    """
    if resume_options not in ("checkpoint", "arguments"):
        raise ValueError(
            "resume_options must be 'checkpoint' (the saved learning rate and schedule) or 'arguments' (the ones that "
            f"are passed), got {resume_options!r}" + did_you_mean(resume_options, ("checkpoint", "arguments"))
        )


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Copy the options of each parameter group, such as its learning rate, including those that a scheduler added.

    Counters that an optimizer keeps beside them, such as those of schedule-free optimizers, are left out.
    """
    groups = optimizer.param_groups if isinstance(optimizer, Optimizer) else []
    left = {"params", *_counters(optimizer)}
    return [
        {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in group.items()
            if name not in left
        }
        for group in groups
    ]


def _counters(optimizer: Any) -> set[str]:
    """Return what an optimizer keeps in its groups beside options: defaults that no constructor of it accepts."""
    members = OptimizerMembers(optimizer)
    if isinstance(members.optimizer, Optimizer):  # inside a wrapper such as Lookahead, whose groups are those of it
        return _counters(members.optimizer) | {*members.counters}
    makers = [vars(each)["__init__"] for each in type(optimizer).__mro__[:-1] if "__init__" in vars(each)]
    accepted = [each for maker in makers for each in inspect.signature(maker).parameters.values()]
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in accepted):
        return set()
    return {*members.defaults} - {each.name for each in accepted} - _OPTIONS


def put_options(optimizer: Any, options: list[dict[str, Any]]) -> None:
    """Restore the options from :func:`options_of`; the optimizer's state, such as its momentum, is kept."""
    for group, own in zip(groups_of(optimizer), options, strict=False):
        group.update(own)


def advance(scheduler: Any, saved: StateDict, *, num_steps: int | None = None) -> None:
    """Step the scheduler that was passed to the position of the `saved` one.

    One that cannot be stepped like this (it follows a metric, or does not count its steps) loads its saved state.

    Args:
        num_steps: its position, if it is stepped in another unit than the saved one.
    """
    if isinstance(scheduler, WarmupLR) and "num_done" in saved:
        is_over = saved["num_done"] >= saved["length"]
        wanted = scheduler.length if is_over else min(saved["num_done"], scheduler.length)
        _step(scheduler, wanted - scheduler.num_done)
        if scheduler.after is not None and saved["after"] is not None:
            advance(scheduler.after, saved["after"])
        return
    done, count = _num_steps(scheduler.state_dict()), _num_steps(saved)
    if num_steps is not None and count is not None:
        count = num_steps
    if done is None or count is None or isinstance(scheduler, ReduceLROnPlateau):
        scheduler.load_state_dict(saved)
    else:
        _step(scheduler, count - done)


def _step(scheduler: Any, num_steps: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the optimizer did not step
        for _ in range(num_steps):
            scheduler.step()


def _num_steps(state: StateDict) -> int | None:
    """Return the number of steps of a scheduler from its state; None if unknown."""
    if "last_epoch" in state:
        return int(state["last_epoch"])
    inner = state.get(INNER_SCHEDULERS)  # torch's ChainedScheduler
    return _num_steps(inner[0]) if inner else None
