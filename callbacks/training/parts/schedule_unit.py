"""The unit in which a scheduler is stepped, and the check that a schedule was made for it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from functools import partial
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import lr_scheduler

from runnerkit.steps.budget import steps_per_epoch
from runnerkit.support.component_members import SchedulerMembers
from runnerkit.support.function_members import FunctionMembers
from runnerkit.support.plain_values import attributes_of
from runnerkit.support.torch_internals import inner_schedulers, starts_of
from runnerkit.warmup import WarmupLR

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

_PER_STEP = (lr_scheduler.OneCycleLR, lr_scheduler.CyclicLR)
# Of torch's schedulers, and the usual names in those of others.
_LENGTHS = ("total_steps", "T_max", "total_iters", "T_0", "num_training_steps", "t_initial", "max_steps", "max_iters")
_OR_PER_EPOCH = "if epochs are meant, write scheduler_interval='epoch'"


def required_argument(scheduler: Any) -> str | None:
    """Return the argument that ``step`` needs: "metrics", "epoch" or None."""
    return _needs(scheduler)[0]


def optional_metric(scheduler: Any) -> str | None:
    """Return the name of the metric that ``step`` takes but does not need, as timm's PlateauLRScheduler; or None."""
    return _needs(scheduler)[1]


def _needs(scheduler: Any) -> tuple[str | None, str | None]:
    if scheduler is None:
        return None, None
    parameters = inspect.signature(scheduler.step).parameters
    needed = [name for name, each in parameters.items() if each.default is inspect.Parameter.empty]
    metric = next((name for name in ("metrics", "metric") if name in parameters), None)
    if "epoch" in needed:
        return "epoch", metric
    return ("metrics", None) if metric in needed else (None, metric)


def own_unit(scheduler: Any, *, is_made: bool) -> Literal["step", "epoch"]:
    """Return the unit of a scheduler for which none is given; of a warm-up, that of the scheduler after it.

    Args:
        is_made: whether a function made it, which was told the number of steps.
    """
    after = scheduler.after if isinstance(scheduler, WarmupLR) else scheduler
    return "step" if isinstance(after, _PER_STEP) or (is_made and required_argument(after) is None) else "epoch"


def check_unit(scheduler: Any, runner: IRunner) -> None:
    """Raise if a scheduler that is stepped after each epoch, unasked, was made for the optimizer steps of the stage.

    Warn if the stage ends within its first epoch: the rate does not change, as in a trial run, or in a long epoch.

    Raises:
        ValueError: it has as many units as the stage has steps.
    """
    stage = runner.current_run.stage
    per_epoch = steps_per_epoch(runner.loaders, runner.callbacks, steps_per_batch=runner.steps_per_batch)
    if stage.num_steps is None or per_epoch == 1:
        return
    num_batches, num_processes = stage.budget.count_steps(runner, {1}) or 0, runner.engine.num_processes
    counts = {num_batches * num_processes: f"batches of {num_processes} processes", num_batches: "batches"}
    counts[stage.num_steps] = "optimizer steps"
    for name, length in _lengths(scheduler):
        if length in counts and length > max(1, runner.stage_epoch_len or 1):
            raise ValueError(
                f"{name} is stepped after each epoch, but was made for all {length} {counts[length]} of the run: "
                f"{_remedy(scheduler)}; {_OR_PER_EPOCH}"
            )
    is_short = per_epoch is not None and stage.num_steps < per_epoch
    if is_short and not _acts_otherwise(scheduler) and runner.engine.is_main_process:
        logger.warning(
            "%s is stepped after each epoch, but the run ends after %d of the %d optimizer steps of its first, so the "
            "learning rate will not change: %s; %s",
            type(scheduler).__name__, stage.num_steps, per_epoch, _remedy(scheduler), _OR_PER_EPOCH,
        )  # fmt: skip


def warn_if_idle(scheduler: Any, runner: IRunner) -> None:
    """Warn at the end of a stage of steps that its only epoch ended with it, and a scheduler acted after all steps.

    If the length of an epoch is known, :func:`check_unit` has said so.
    """
    is_of_steps = runner.current_run.stage.budget.given.num_steps is not None
    is_one_epoch = runner.stage_epoch_step == 1 and runner.stage_optimizer_step > 0
    per_epoch = steps_per_epoch(runner.loaders, runner.callbacks, steps_per_batch=runner.steps_per_batch)
    if not is_of_steps or not is_one_epoch or per_epoch is not None or _acts_otherwise(scheduler):
        return
    if not runner.engine.is_main_process:
        return
    logger.warning(
        "%s was stepped after each epoch, and the run was one epoch of %d optimizer steps, so the learning rate did "
        "not change: %s; %s", type(scheduler).__name__, runner.stage_optimizer_step, _remedy(scheduler), _OR_PER_EPOCH,
    )  # fmt: skip


def _acts_otherwise(scheduler: Any) -> bool:
    """Return whether a scheduler also acts within an epoch, or not by itself."""
    is_told = SchedulerMembers(scheduler).step_update is not None or required_argument(scheduler) is not None
    return is_told or isinstance(scheduler, WarmupLR)


def _remedy(scheduler: Any) -> str:
    if SchedulerMembers(scheduler).step_update is not None:
        return "make it with t_in_epochs=False, and it is told the number of steps"
    return "write scheduler_interval='step', or SchedulerCallback(interval='step'), to step it after each of them"


def _lengths(scheduler: Any, start: int = 0, before: str = "") -> Iterator[tuple[str, int]]:
    """Yield what a scheduler, and those inside it, were made for, as text and as a number of units.

    Args:
        start: units before it, of the schedulers that precede it, which `before` describes.
    """
    if isinstance(scheduler, WarmupLR):
        before = f" after a warm-up of {scheduler.length}"
        yield from _lengths(scheduler.after, scheduler.length, before)
        return
    inner, starts = inner_schedulers(scheduler), starts_of(scheduler)
    for each, first in zip(inner, starts, strict=True):
        if first == starts[-1]:  # one of those that run to the end; a warm-up before them is not made for the run
            yield from _lengths(each, start + first, f" after {first} of other schedulers" if first else before)
    if inner or SchedulerMembers(scheduler).t_in_epochs is False:
        return
    kind = type(scheduler).__name__
    for name in _LENGTHS:
        yield from _with_start(f"{kind}({name}=%d)", getattr(scheduler, name, None), start, before)
    for function in SchedulerMembers(scheduler).lr_lambdas:
        for name, number in _numbers_of(function):
            yield from _with_start(f"{kind}, whose function has {name}=%d,", number, start, before)


def _with_start(words: str, length: Any, start: int, before: str) -> Iterator[tuple[str, int]]:
    if isinstance(length, Integral) and not isinstance(length, bool):
        length = int(length)
        yield words % length, length
        if start:
            yield words % length + before, start + length


def _numbers_of(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that a schedule's function reads, by name: arguments, closure, globals, attributes."""
    if isinstance(function, partial):
        yield from function.keywords.items()
        yield from (("an argument", each) for each in function.args)
        yield from _numbers_of(function.func)
        return
    if not inspect.isroutine(function):  # an object with __call__
        function = function.__call__
    its = FunctionMembers(function)
    read = () if its.code is None else its.code.co_names
    for owner in (function, its.owner):
        # Others may be of anything, as those of a config are.
        yield from ((name, each) for name, each in attributes_of(owner).items() if name in read)
    if inspect.isfunction(function):
        try:
            closure = inspect.getclosurevars(function)
        except ValueError:  # a variable without a value yet
            return
        yield from {**closure.globals, **closure.nonlocals}.items()
        defaults = inspect.signature(function).parameters.items()
        yield from ((name, each.default) for name, each in defaults)
