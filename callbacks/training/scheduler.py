"""Learning-rate schedules, stepped once per epoch or after each optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer, lr_scheduler

from runnerkit.callback import CallbackOrder, ISchedulerCallback, last_training_loader, monitor_of_savers, outermost
from runnerkit.callbacks.training.parts.schedule_length import check_length
from runnerkit.callbacks.training.parts.schedule_unit import (
    check_unit,
    optional_metric,
    own_unit,
    required_argument,
    warn_if_idle,
)
from runnerkit.errors import UnknownKeyError, check_component
from runnerkit.monitor import Mode, Monitor, MonitorPart, ThreeArguments
from runnerkit.support.arguments import check_strings
from runnerkit.support.component_members import SchedulerMembers
from runnerkit.support.deprecation import Renamed, accepts_old_names
from runnerkit.types import StateDict, as_dict, widest_float
from runnerkit.warmup import WarmupLR

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["SchedulerCallback"]

_NOTHING: dict[str, float] = {}
_COUNTERS = ("num_bad_epochs", "cooldown_counter")


class SchedulerCallback(ISchedulerCallback):
    """Step a scheduler: any object with ``step()``, ``step(metric)`` as in ReduceLROnPlateau, or ``step(epoch)``.

    One whose ``step`` takes a `metric` that it does not need, as timm's PlateauLRScheduler, is told that of the epoch.
    One with ``step_update(num_updates)``, as in timm, is told the number of optimizer steps after each of them, and
    ``step`` the number of epochs after each of them.

    A WarmupLR is stepped in its own unit until it ends; the arguments then apply to the scheduler after it.

    Args:
        scheduler_key: which scheduler, if the runner has several.
        interval: "epoch", or "step": after each actual optimizer step, also of several in a batch (batches that only
            accumulate and steps that the gradient scaler skips do not count; one that needs a metric steps once a
            batch). None is the runner's `scheduler_interval`, or else the unit of the scheduler: "step" for OneCycleLR,
            CyclicLR, and those that a function passed to `train` made, unless they need an argument; "epoch" for
            others.
        monitor: the metric for a scheduler that needs one, such as "valid/loss". None is the metric that selects the
            best checkpoint, or would with a logdir, else the loss of "valid", of the only evaluation loader, or of
            "train" if there is none; of a scheduler that steps after each optimizer step, the loss of the batch.
        mode: whether smaller ("min") or larger ("max") values of it are better, to check the scheduler's own mode.
    Raises:
        ValueError: the scheduler waits for larger values, and the metric is better if smaller, or the reverse. There
            are several evaluation loaders, and none of them is "valid". The run takes more steps than a OneCycleLR has.
            A schedule was made for the steps of the run, and is stepped after each epoch because no unit is given.
            Other code steps it too.

    >>> SchedulerCallback(interval="step").interval
    'step'
    """

    loader_key = MonitorPart[str | None]("loader")
    metric_key = MonitorPart[str | None]("metric")

    @accepts_old_names(
        Renamed("mode", "interval", {"epoch": "epoch", "step": "step", "batch": "step"}),
        ThreeArguments(minimize=None, defaults=("", "loss")),  # "": a loader that the run chooses
        by_position=("mode", "loader_key", "metric_key"),
    )
    def __init__(
        self,
        scheduler_key: str | None = None,
        *,
        interval: Literal["epoch", "step"] | None = None,
        monitor: str | None = None,
        mode: Mode | None = None,
    ) -> None:
        # Before the checkpoint of the same epoch, so that a resumed run continues with the next epoch's learning rate.
        super().__init__(order=CallbackOrder.Scheduler)
        check_strings(self, or_none=True, scheduler_key=scheduler_key)
        if interval not in (None, "epoch", "step"):
            raise ValueError(f"SchedulerCallback: interval must be 'epoch', 'step' or None, got {interval!r}")
        self.scheduler_key = scheduler_key
        self.interval = interval
        self.monitor = Monitor.if_given("SchedulerCallback", monitor, mode)
        if self.monitor is not None and self.monitor.loader:
            self.requires = (self.monitor.pair,)
        self._unit: str | None = None  # the one that is given
        self._steps_per_batch = self._is_ever_per_batch = False
        self._optimizer_stepped = self._updates = False
        self._scheduler: Any = None
        self._count: int | None = None  # its steps after the first one, to see those of others
        self._is_checked = False
        self._after: Any = None  # the one after the warmup, or the scheduler itself
        self._hooks: list[Any] = []
        self._filter: Any = None
        self._arguments: dict[int, str | None] = {}  # by id of the scheduler, or of the one after the warmup

    def on_stage_start(self, runner: IRunner) -> None:
        # torch marks the optimizer's `step` when a scheduler is constructed; pickling loses the mark. catch_warnings at
        # each step would be slow and would reset which of the user's warnings were already shown.
        warnings.filterwarnings("ignore", message="Seems like `optimizer.step")
        self._filter = warnings.filters[0]
        schedulers = as_dict(runner.scheduler)
        check_component(self, "scheduler", self.scheduler_key, schedulers)
        self._check_unit(runner)
        self._follow(schedulers[self.scheduler_key or ""], runner)
        if self._unit == "step" and self._argument_of(self._after) == "epoch":
            raise ValueError(
                f"step of {type(self._after).__name__} needs the number of the epoch, so it cannot be stepped after "
                "each optimizer step: leave the unit out, and step_update, if it has one, is told the number of steps"
            )
        is_metric_needed = self._argument_of(self._after) == "metrics"
        if is_metric_needed or _plateau_of(self._after) is not None:
            loader_key, metric_key = self._choose_metric(runner)  # raises before training
            if is_metric_needed and self._steps_per_batch and not loader_key.startswith("train"):
                raise ValueError(
                    f"{type(self._after).__name__} is stepped after each optimizer step, with a metric of the batch, "
                    f"but {metric_key!r} of loader {loader_key!r} is known after an evaluation: pass a metric of the "
                    "training loader, or interval='epoch'"
                )
        found = runner.current_run.resume_point.found
        if found is None or found.is_restored:  # else the checkpoint's schedule continues
            if self._unit is None and not self._steps_per_batch:
                check_unit(self._scheduler, runner)
            check_length(self._scheduler, runner, is_per_step=self._steps_per_batch)

    def _check_unit(self, runner: IRunner) -> None:
        # "manual" concerns the schedulers that no callback steps.
        given = None if runner.scheduler_interval == "manual" else runner.scheduler_interval
        own = self.interval
        if given is not None and own is not None and given != own:
            raise ValueError(
                f"scheduler_interval={given!r} and SchedulerCallback(interval={own!r}) contradict each other: leave "
                "one of the two out"
            )
        self._unit = own or given

    def _choose_metric(self, runner: IRunner) -> tuple[str, str]:
        judge = None if self._steps_per_batch else _judge(runner)  # of a batch, its loss
        watched = self.monitor or judge or Monitor("", "loss", minimize=True)
        watched = watched if watched.loader else replace(watched, loader=self._only_loader(runner))
        mode = {True: "min", False: "max", None: None}[watched.minimize]
        plateau = _plateau_of(self._after)
        if plateau is not None and mode not in (plateau.mode, None):
            name = "ReduceLROnPlateau" if plateau is self._after else type(self._after).__name__
            raise ValueError(
                f"{name}(mode={plateau.mode!r}) would read {watched}: pass mode={mode!r} to it, or "
                "another metric with SchedulerCallback(monitor='loader/metric')"
            )
        return watched.pair

    def _only_loader(self, runner: IRunner) -> str:
        if self._steps_per_batch:
            return next((key for key in runner.loaders if key.startswith("train")), "train")
        others = [key for key in runner.loaders if not key.startswith("train")]
        if "valid" in others:
            return "valid"
        if len(others) > 1:
            raise ValueError(
                f"the scheduler needs the metric of one of the loaders {', '.join(map(repr, others))}: pass "
                f"SchedulerCallback(monitor='{others[0]}/loss'), or monitor= to train"
            )
        return others[0] if others else last_training_loader(runner.loaders)

    def on_loader_start(self, runner: IRunner) -> None:
        scheduler = as_dict(runner.scheduler)[self.scheduler_key or ""]
        if scheduler is not self._scheduler:  # replaced since the last loader
            self._unfollow()
            self._follow(scheduler, runner)

    def _follow(self, scheduler: Any, runner: IRunner) -> None:
        self._scheduler, self._count, self._is_checked = scheduler, None, False
        self._optimizer_stepped = False
        wrapper = outermost(self, runner.callbacks.values())
        acts = None if wrapper is self else wrapper.acts_in_loader
        self._after = scheduler.after if isinstance(scheduler, WarmupLR) else scheduler
        is_made = (self.scheduler_key or "") in runner.current_run.stage.made_schedulers
        self._steps_per_batch = (self._unit or own_unit(scheduler, is_made=is_made)) == "step"
        warms_up_per_batch = isinstance(scheduler, WarmupLR) and scheduler.is_per_step
        members = SchedulerMembers(scheduler)
        self._updates = members.step_update is not None
        self._is_ever_per_batch = self._steps_per_batch or warms_up_per_batch or self._updates
        self.is_per_epoch = not self._is_ever_per_batch
        optimizer = members.optimizer
        if self._is_ever_per_batch and isinstance(optimizer, Optimizer):
            again, note = partial(self._step_before_another, runner), partial(self._note_step, runner, acts)
            self._hooks = [optimizer.register_step_pre_hook(again), optimizer.register_step_post_hook(note)]
        self._follows_optimizer = bool(self._hooks)
        self._arguments.clear()

    def _unfollow(self) -> None:
        for each in self._hooks:
            each.remove()
        self._scheduler, self._hooks = None, []

    def _current(self, runner: IRunner) -> tuple[Any, bool]:
        """Return the scheduler to step now, and whether it steps after each optimizer step."""
        scheduler = as_dict(runner.scheduler)[self.scheduler_key or ""]
        if not isinstance(scheduler, WarmupLR):
            return scheduler, self._steps_per_batch
        return (scheduler.after, self._steps_per_batch) if scheduler.is_over else (scheduler, scheduler.is_per_step)

    def _note_step(self, runner: IRunner, acts: Callable[[IRunner], bool] | None, *_: Any) -> None:
        self._optimizer_stepped = acts is None or acts(runner)

    def _step_before_another(self, runner: IRunner, *_: Any) -> None:
        if not self._optimizer_stepped or not runner.is_within_loader:  # the first step of the batch
            return
        scheduler, is_per_batch = self._current(runner)
        if self._updates:
            scheduler.step_update(num_updates=runner.stage_optimizer_step)
        if is_per_batch and (argument := self._argument_of(scheduler)) != "metrics":
            self._step(scheduler, runner, argument)

    def on_batch_end(self, runner: IRunner) -> None:
        if not self._is_ever_per_batch or not runner.is_train_loader:
            return
        stepped, self._optimizer_stepped = self._optimizer_stepped or not self._follows_optimizer, False
        scheduler, is_per_batch = self._current(runner)
        if self._updates and stepped:
            scheduler.step_update(num_updates=runner.stage_optimizer_step)
        if is_per_batch and stepped:
            argument, metric = self._argument_of(scheduler), None
            if argument == "metrics":
                name = self.monitor.metric if self.monitor is not None else "loss"
                metric = _metric_in(runner.batch_metrics, name, runner.loader_key)
                if runner.engine.num_processes > 1:
                    metric = _mean_over_processes(metric, runner)
            self._step(scheduler, runner, argument, metric=metric)

    def on_loader_end(self, runner: IRunner) -> None:
        if self._optimizer_stepped:  # after the last batch
            self.on_batch_end(runner)

    def on_epoch_end(self, runner: IRunner) -> None:
        scheduler, is_per_batch = self._current(runner)
        if is_per_batch or not any(key.startswith("train") for key in runner.epoch_metrics):
            return
        argument = self._argument_of(scheduler)
        if argument != "metrics":
            self._step(scheduler, runner, argument, told=self._told(scheduler, runner))
            return
        loader_key, metric_key = self._choose_metric(runner)
        if loader_key in runner.epoch_metrics:
            metric = _metric_in(runner.epoch_metrics[loader_key], metric_key, loader_key)
            self._step(scheduler, runner, argument, metric=metric)

    def _told(self, scheduler: Any, runner: IRunner) -> dict[str, float]:
        """Return the metric of this epoch for a scheduler that takes one without needing it; {} if it is not known."""
        name = optional_metric(scheduler)
        if name is None:
            return {}
        is_chosen = self.monitor is not None or _plateau_of(scheduler) is not None
        try:
            loader_key, metric_key = self._choose_metric(runner)
        except ValueError:  # several loaders
            if is_chosen:
                raise
            return {}
        metrics = runner.epoch_metrics.get(loader_key)
        if metrics is None or (metric_key not in metrics and not is_chosen):
            return {}
        return {name: _metric_in(metrics, metric_key, loader_key)}

    def state_dict(self) -> StateDict:
        """Return the counters of the ReduceLROnPlateau inside timm's scheduler, whose own state lacks them."""
        plateau = _plateau_of(self._after)
        if plateau is None or plateau is self._after:
            return {}
        return {name: getattr(plateau, name) for name in _COUNTERS}

    def load_state_dict(self, state: StateDict) -> None:
        plateau = _plateau_of(self._after)
        for name in _COUNTERS if state and plateau is not None else ():
            setattr(plateau, name, state[name])

    def on_stage_end(self, runner: IRunner) -> None:
        if self._unit is None and not self._steps_per_batch:
            warn_if_idle(self._scheduler, runner)
        self.on_exception(runner)

    def on_exception(self, runner: IRunner) -> None:
        self._unfollow()
        if self._filter in warnings.filters:
            warnings.filters.remove(self._filter)  # type: ignore[attr-defined]  # a list, typed as a sequence

    def _step(
        self, scheduler: Any, runner: IRunner, argument: str | None, *,
        metric: Any = None, told: dict[str, float] = _NOTHING,
    ) -> None:  # fmt: skip
        if scheduler is None:  # no scheduler after the warmup
            return
        is_checked = self._is_checked
        if not is_checked:
            self._check_is_alone(scheduler)
        if argument == "metrics":
            scheduler.step(metric.detach() if isinstance(metric, torch.Tensor) else metric)  # torch warns of a graph
        elif argument == "epoch":
            scheduler.step(runner.stage_epoch_step, **told)
        else:
            scheduler.step(**told)
        if not is_checked:
            self._count = SchedulerMembers(scheduler).last_epoch

    def _check_is_alone(self, scheduler: Any) -> None:
        """Raise, at the second step, if other code has stepped the scheduler since the first one."""
        if self._count is None:
            return
        self._is_checked = True
        count = SchedulerMembers(scheduler).last_epoch
        if count is not None and count > self._count:  # a smaller one: the run has gone back
            raise ValueError(
                f"{type(scheduler).__name__} is stepped by the run, and by your code too, so the learning rate changes "
                "twice as fast: leave out your step(), or write scheduler_interval='manual'"
            )

    def _argument_of(self, scheduler: Any) -> str | None:
        if id(scheduler) not in self._arguments:
            self._arguments[id(scheduler)] = required_argument(scheduler)
        return self._arguments[id(scheduler)]


def _metric_in(metrics: Mapping[str, Any], metric_key: str, loader_key: str) -> Any:
    if metric_key not in metrics:
        raise UnknownKeyError(
            f"the scheduler needs metric {metric_key!r} of loader {loader_key!r}, which has {sorted(metrics)}: "
            "pass SchedulerCallback(monitor='loader/metric')"
        )
    return metrics[metric_key]


def _plateau_of(scheduler: Any) -> lr_scheduler.ReduceLROnPlateau | None:
    """Return the ReduceLROnPlateau that a scheduler is, or has inside it, as timm's; None for any other."""
    inner = SchedulerMembers(scheduler).lr_scheduler
    return next((each for each in (scheduler, inner) if isinstance(each, lr_scheduler.ReduceLROnPlateau)), None)


def _judge(runner: IRunner) -> Monitor | None:
    """Return the monitor that selects the best checkpoint, or would with a logdir, if there is one."""
    return monitor_of_savers(runner.callbacks) or runner.current_run.stage.monitor  # the latter without a logdir


def _mean_over_processes(metric: Any, runner: IRunner) -> Any:
    """Return the batch's metric as of all samples of the step, for all processes to decide alike; waits for it."""
    dtype, device, size = widest_float(runner.engine.device), runner.engine.device, runner.batch_size
    value = torch.as_tensor(metric, dtype=dtype, device=device).detach()
    total, count = runner.engine.reduce(torch.stack([value * size, torch.full_like(value, size)])).tolist()
    return total / count if count else None
