"""Comparison of a schedule's length with the length of the run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch.optim import lr_scheduler

from runnerkit.callback import IOptimizerCallback, optimizer_callbacks
from runnerkit.support.torch_internals import inner_schedulers, last_milestone
from runnerkit.warmup import WarmupLR

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

_ARGUMENTS = {
    lr_scheduler.OneCycleLR: "total_steps",
    lr_scheduler.CosineAnnealingLR: "T_max",
    lr_scheduler.PolynomialLR: "total_iters",
}


def check_length(scheduler: Any, runner: IRunner, *, is_per_step: bool) -> None:
    """Raise if a one-cycle schedule has fewer steps than the stage takes; warn if a schedule does not end with it.

    Args:
        scheduler: a scheduler that has not been stepped in this stage.
        is_per_step: whether it is stepped after each optimizer step, or after each epoch; a warm-up has its own unit.
    Raises:
        ValueError: with the number to pass.
    """
    paces = {each.accumulation_steps for each in optimizer_callbacks(runner.callbacks)}
    if len(paces) > 1:
        return  # which of them steps the scheduler's optimizer?
    if isinstance(scheduler, WarmupLR):
        length = _length(runner, is_per_step=scheduler.is_per_step)
        if length is not None and scheduler.length > length:
            _warn(
                runner,
                f"the warm-up takes {scheduler.length} of {_describe(length, scheduler.is_per_step)}: shorten it",
            )
        elif length is not None and scheduler.is_per_step == is_per_step:
            _check(scheduler.after, runner, length - scheduler.length, is_per_step=is_per_step)
        return
    length = _length(runner, is_per_step=is_per_step)
    if length is not None:
        _check(scheduler, runner, length, is_per_step=is_per_step)


def _check(scheduler: Any, runner: IRunner, length: int, *, is_per_step: bool) -> None:
    """Compare a scheduler, and those inside it, with the number of times that it is stepped."""
    inner = inner_schedulers(scheduler)
    if isinstance(scheduler, lr_scheduler.SequentialLR):
        _check(inner[-1], runner, length - last_milestone(scheduler), is_per_step=is_per_step)
    elif inner:
        for each in inner:
            _check(each, runner, length, is_per_step=is_per_step)
    elif type(scheduler) in _ARGUMENTS and length > 0:
        _check_one(scheduler, runner, length, is_per_step=is_per_step)


def _check_one(scheduler: Any, runner: IRunner, length: int, *, is_per_step: bool) -> None:
    name, argument = type(scheduler).__name__, _ARGUMENTS[type(scheduler)]
    own, done = getattr(scheduler, argument), max(0, scheduler.last_epoch)
    found = f"{name}({argument}={own}) is stepped {_describe(length, is_per_step)}"
    remedy = f"pass {argument}={done + length}"
    if is_per_step:
        remedy += ", or scheduler=, a function of the optimizer and the number of steps"
    if isinstance(scheduler, lr_scheduler.OneCycleLR) and own - done < length:
        words = f"{found}, and would raise after {own - done}: {remedy}; to end the run earlier, pass num_steps"
        if _is_sure(runner, is_per_step=is_per_step):
            raise ValueError(words)
    elif own - done > length + 1:  # with one more, the last step has the last rate
        is_for_steps = not is_per_step and own == runner.current_run.stage.num_steps
        other = "; to step it after each optimizer step, write scheduler_interval='step'" if is_for_steps else ""
        _warn(runner, f"{found}, so the run ends before the schedule: {remedy}{other}")
    elif is_per_step and own == runner.stage_epoch_len and own < length:
        _warn(runner, f"{found}, but {own} is the number of epochs, after which the rate rises again: {remedy}")


def _length(runner: IRunner, *, is_per_step: bool) -> int | None:
    """Return the steps or epochs of the stage; None if they are not known."""
    if is_per_step:
        return runner.current_run.stage.num_steps
    budget = runner.current_run.stage.budget.given
    return budget.num_epochs if budget.limits == ["num_epochs"] else None


def _describe(length: int, is_per_step: bool) -> str:
    return f"{length} optimizer steps" if is_per_step else f"{length} epochs"


def _is_sure(runner: IRunner, *, is_per_step: bool) -> bool:
    """Return whether every batch, or group of accumulated batches, is a step, which `handle_batch` may do otherwise."""
    unwrapped = [each for each in runner.callbacks.values() if isinstance(each, IOptimizerCallback)]
    return not is_per_step or (bool(unwrapped) and unwrapped == optimizer_callbacks(runner.callbacks))


def _warn(runner: IRunner, words: str) -> None:
    if runner.engine.is_main_process:
        logger.warning("%s", words)
