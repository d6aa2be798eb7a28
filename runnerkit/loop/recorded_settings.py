"""Settings of a run that are recorded without being asked for, to compare runs by."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runnerkit.callback import ICallback, innermost
from runnerkit.resume.compatibility import step_settings
from runnerkit.resume.overrides import options_of
from runnerkit.sampling.loader_members import LoaderMembers
from runnerkit.support.component_members import OptimizerMembers
from runnerkit.support.plain_values import plain
from runnerkit.support.redaction import redacted
from runnerkit.types import as_dict
from runnerkit.warmup import WarmupLR

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

_DEFAULTS = {"accumulation_steps": 1, "loss_reduction": "mean"}  # left out


def recorded_settings(runner: IRunner) -> dict[str, Any]:
    """Collect the optimizers' and schedulers' classes and options, batch sizes and limits of the stage under way.

    Plain values without credentials, for ``environment.json``, where the engine, its precision and the seed have their
    own entries. A learning rate is the one before schedules.
    """
    limits = vars(runner.current_run.stage.budget.given)
    schedulers = as_dict(runner.scheduler)
    sizes = {key: LoaderMembers(loader).batch_size for key, loader in runner.loaders.items()}
    settings: dict[str, Any] = {
        "optimizer": _by_key(
            {key: _optimizer(each, schedulers.get(key)) for key, each in as_dict(runner.optimizer).items()}
        ),
        "scheduler": _by_key({key: type(each).__name__ for key, each in schedulers.items()}),
        "batch_size": {key: size for key, size in sizes.items() if size is not None},
        "precision": precision_of(runner.current_run.stage.autocast),
        **limits,
        **{name: value for name, value in step_settings(runner).items() if value != _DEFAULTS.get(name)},
        "monitored": _monitored(runner.callbacks.values()),
    }
    known: dict[str, Any] = redacted(plain({name: value for name, value in settings.items() if value is not None}))
    return known


def _by_key(parts: dict[str, Any]) -> Any:
    """Return the only part without a key, several by key, None without any."""
    return parts[""] if parts.keys() == {""} else parts or None


def _optimizer(optimizer: Any, scheduler: Any) -> dict[str, Any]:
    """Return the class and the options; of several parameter groups that differ in an option, a list of values."""
    groups, defaults = options_of(optimizer), OptimizerMembers(optimizer).defaults
    options: dict[str, Any] = {"name": type(optimizer).__name__}
    for name in (each for each in (groups[0] if groups else {}) if each in defaults):
        values = [group.get(name) for group in groups]
        if name == "lr":
            values = _rates(groups, scheduler, default=defaults[name])
        elif len(groups) == 1:
            values = [defaults[name]]  # a schedule may change the group's
        values = [_without_tensors(each) for each in values]
        options[name] = values[0] if all(each == values[0] for each in values) else values
    return {name: value for name, value in options.items() if value is not None}


def _without_tensors(value: Any) -> Any:
    """Return numbers of a tensor, such as a learning rate of a compiled optimizer, which is read once, at the start."""
    if isinstance(value, list | tuple):
        return [_without_tensors(each) for each in value]
    return value.tolist() if isinstance(value, Tensor) else value


def _rates(groups: list[dict[str, Any]], scheduler: Any, *, default: Any) -> list[Any]:
    if isinstance(scheduler, WarmupLR):
        return list(scheduler.full_lrs)
    if scheduler is None:
        return [group["lr"] for group in groups]
    unscheduled = [default] if len(groups) == 1 else [group["lr"] for group in groups]
    return [group.get("initial_lr", rate) for group, rate in zip(groups, unscheduled, strict=True)]


def precision_of(autocast: Any) -> str | None:
    """Return the dtype of mixed precision; the name of the class is in the engine's entry."""
    return str(autocast.fast_dtype).removeprefix("torch.") if isinstance(autocast, torch.autocast) else None


def _monitored(callbacks: Iterable[ICallback]) -> list[str] | None:
    """Return the metrics that select checkpoints, stop the run or step a schedule, such as "valid/accuracy"."""
    read = [each for callback in map(innermost, callbacks) for each in callback.requires]
    return list(dict.fromkeys(f"{loader}/{metric}" for loader, metric in read)) or None
