"""Checks of the schedulers of a run: their form, their unit, and that something steps each of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from torch.optim import Optimizer

from runnerkit.callback import ISchedulerCallback, innermost
from runnerkit.monitor import likely_monitor
from runnerkit.support.component_members import SchedulerMembers
from runnerkit.types import as_dict, groups_of, has_step

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

Interval: TypeAlias = Literal["step", "epoch", "manual"]

_MEANING = "'step' (after each optimizer step), 'epoch' (after each epoch) or 'manual' (your code steps it)"
_UNUSED = "; in a stage that is meant to keep its learning rate, let get_scheduler return None"
_EVERY = object()
_LIGHTNING = {"scheduler", "interval", "frequency", "monitor", "strict", "name", "reduce_on_plateau"}


def check_interval(interval: Any) -> None:
    """Raise unless `interval` is None or one of the intervals.

    Raises:
        ValueError: with the intervals and their meaning.
    """
    if interval not in (None, "step", "epoch", "manual"):
        hint = "; 'step' is the unit of batches too" if interval in ("batch", "iteration", "iter") else ""
        raise ValueError(f"scheduler_interval must be {_MEANING}, or None, got {interval!r}{hint}")


def check_form(scheduler: Any) -> None:
    """Raise if something other than schedulers, functions that make them, or a dict of either was passed.

    Raises:
        TypeError: with what to write.
    """
    if isinstance(scheduler, dict) and "scheduler" in scheduler and scheduler.keys() <= _LIGHTNING:
        raise TypeError(_of_lightning(scheduler))
    if isinstance(scheduler, list | tuple):
        raise TypeError(
            f"scheduler= takes one scheduler, or a dict of several by the keys of their optimizers, got a "
            f"{type(scheduler).__name__} of {len(scheduler)}: write scheduler={{'name': ..., 'other': ...}}, or one "
            "torch.optim.lr_scheduler.SequentialLR or ChainedScheduler for one optimizer"
        )
    for key, each in as_dict(scheduler).items():
        name = f"scheduler {key!r}" if key else "scheduler"
        if isinstance(each, type):
            raise TypeError(
                f"{name} is the class {each.__name__}; pass an instance of it, or a function of the optimizer and "
                "the number of steps"
            )
        if isinstance(each, str):
            raise TypeError(
                f"{name} is the string {each!r}, but schedulers are not chosen by name: write scheduler="
                "dl.cosine_with_warmup, or an object such as torch.optim.lr_scheduler.StepLR(optimizer, 10)"
            )
        if hasattr(each, "zero_grad"):  # an optimizer would make a step more, a module would be called
            raise TypeError(
                f"{name} is a {type(each).__name__}, not a scheduler; pass for example "
                "scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 10)"
            )
        if each is not None and not has_step(each) and not callable(each):
            raise TypeError(
                f"{name} is a {type(each).__name__} without a method step(): pass a scheduler, or a function of the "
                "optimizer and the number of steps"
            )


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise if a scheduler belongs to an optimizer that does not train: the learning rate would not change.

    An optimizer that wraps another one, such as Lookahead, has the groups of the inner one.

    Raises:
        TypeError, ValueError: with what to do.
    """
    check_form(scheduler)
    groups = {id(group) for each in as_dict(optimizer).values() for group in groups_of(each)}
    for key, each in as_dict(scheduler).items():
        own = SchedulerMembers(each).optimizer
        if groups and isinstance(own, Optimizer) and not any(id(group) in groups for group in own.param_groups):
            name = f"scheduler {key!r}" if key else "the scheduler"
            raise ValueError(f"{name} steps an optimizer other than the one that trains; create it from that one")


def unstepped(schedulers: Any, callbacks: Mapping[str, Any]) -> list[str]:
    """Return the keys of the schedulers that no callback steps.

    A custom callback without a `scheduler_key` steps all of them.
    """
    steppers = [each for each in map(innermost, callbacks.values()) if isinstance(each, ISchedulerCallback)]
    keys = [getattr(each, "scheduler_key", _EVERY) for each in steppers]
    if _EVERY in keys:
        return []
    stepped = {key or "" for key in keys}
    return [key for key, each in as_dict(schedulers).items() if each is not None and key not in stepped]


def check_stepped(runner: IRunner) -> None:
    """Raise if nothing would step a scheduler of the stage, or if callbacks step all that the user's code steps.

    With "manual", the user's code steps those that no SchedulerCallback steps.

    Raises:
        ValueError: with what to write.
    """
    schedulers, interval = as_dict(runner.scheduler), runner.scheduler_interval
    check_interval(interval)
    if not any(key.startswith("train") for key in runner.loaders):
        return
    missing = unstepped(schedulers, runner.callbacks)
    if interval == "manual":
        if not missing and any(each is not None for each in schedulers.values()):
            raise ValueError(
                "scheduler_interval='manual' says that your code steps the scheduler, which a SchedulerCallback does "
                "as well: remove one of the two"
            )
        return
    if missing and interval is not None:
        raise ValueError(
            f"scheduler_interval={interval!r}, but get_callbacks of {type(runner).__name__} returns no callback that "
            f"steps the scheduler: add SchedulerCallback({repr(missing[0]) if missing[0] else ''}) to it; if your code "
            f"steps it, write scheduler_interval='manual'{_UNUSED}"
        )
    if missing:
        name, argument = (f"scheduler {missing[0]!r}", repr(missing[0])) if missing[0] else ("the scheduler", "")
        raise ValueError(
            f"nothing steps {name}, so the learning rate would not change, unless your code steps it: write "
            "scheduler_interval='step' or 'epoch' (an argument of train) to have it stepped after each optimizer step "
            f"or epoch, or add SchedulerCallback({argument}) to the callbacks; if your code steps it, write "
            f"scheduler_interval='manual', which may also be an attribute of {type(runner).__name__}{_UNUSED}"
        )


def _of_lightning(given: dict[str, Any]) -> str:
    interval, inner = given.get("interval", "epoch"), given.get("scheduler")
    unit = interval if interval in ("step", "epoch") else "epoch"
    words = (
        f"scheduler={{'scheduler': {type(inner).__name__}, ...}} is Lightning's form: write scheduler=the scheduler "
        f"itself, and scheduler_interval={unit!r}"
    )
    if given.get("monitor") is not None:
        monitor = likely_monitor(str(given["monitor"]))
        words += f", and for monitor={given['monitor']!r} callbacks=[dl.SchedulerCallback(monitor={monitor!r})]"
    if given.get("frequency", 1) != 1:
        words += f"; frequency={given['frequency']} is not supported: make the schedule longer instead"
    return words
