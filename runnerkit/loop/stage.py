"""Stages: components are made and prepared by the engine; callbacks listen to events."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from runnerkit.callback import (
    EVENTS,
    CallbackNode,
    ICallback,
    ICheckpointCallback,
    IListener,
    IMetricCallback,
    innermost,
    optimizer_callbacks,
)
from runnerkit.loop import checks, parameter_checks
from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.hooks import call_hook
from runnerkit.loop.loader_run import is_training
from runnerkit.models.evaluation_weights import EvaluationWeights
from runnerkit.models.modes import TrainingModes
from runnerkit.resume import resume_point
from runnerkit.seeding.generators import derive_seed, set_global_seed
from runnerkit.steps import step_watch
from runnerkit.steps.budget import Budget, accumulation_of, budget_of, count_steps, paces_of
from runnerkit.steps.gradient_step import IDLE, WeightUnits, without_weight
from runnerkit.support.torch_internals import inner_schedulers
from runnerkit.types import as_dict, like

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


_SAVED_IN = ("on_step_end", "on_epoch_end")  # after everyone else: a checkpoint holds what they did


class Listeners(dict[str, tuple[Callable[[Any], None], ...]]):
    """Methods that act on each event, in order; an event without overrides costs nothing."""

    def __init__(self) -> None:
        super().__init__(dict.fromkeys((*EVENTS, IDLE), ()))

    def bind(self, runner: IRunner, callbacks: Iterable[ICallback] = ()) -> None:
        """Find the methods of `callbacks` that run in this process, and of the runner, once for all events."""
        acting, hears = active(runner, callbacks), runner._stage.hears
        savers = [each for each in acting if isinstance(innermost(each), ICheckpointCallback)]
        others = [each for each in acting if each not in savers]
        for event in EVENTS:
            if event.endswith("_start"):
                order: list[IListener] = [runner, *acting]
            elif event in _SAVED_IN:
                order = [*others, runner, *savers]
            else:
                order = [*acting, runner]
            self[event] = tuple(getattr(each, event) for each in order if each.listens_to(event) and hears(each, event))
        scorers = [innermost(each) for each in savers if hears(each, "on_loader_end")]
        keep = [each.keep_scored_weights for each in scorers if isinstance(each, ICheckpointCallback)]
        self["on_loader_end"] = *keep, *self["on_loader_end"]
        counting = {each.on_batch_end for each in acting if _counts_samples(each)}
        self[IDLE] = without_weight, *(each for each in self["on_batch_end"] if each not in counting)

    def release(self) -> None:
        """Forget all methods: those of the runner refer to it, which would keep its loaders' workers."""
        self.update(dict.fromkeys(self, ()))

    def emit(self, event: str, runner: IRunner) -> None:
        """Call the methods that act on `event`."""
        for listener in self[event]:
            listener(runner)


def _counts_samples(callback: ICallback) -> bool:
    inner = innermost(callback)
    return isinstance(inner, IMetricCallback) and inner.counts_samples


class Stage(ProcessState):
    """The stage under way, as the engine prepared it.

    Attributes:
        given_hooks: an object whose ``get_*`` methods make the components in place of the runner's; None outside an
            evaluation.
        training_model: the model as the engine prepared it, or several by key; None outside a stage.
        training_modes: of each model, by key; empty if nothing trains.
        optimized: the optimizers' parameters when the stage began.
        evaluation_weights: of optimizers that evaluate with others than they train.
        autocast: the engine's context for the forward pass.
        listeners: methods that act on events.
        known_callbacks: callbacks of this stage and of earlier ones that act in this process.
        step_watch: present until the first training loader of the stage has ended.
        budget: when the stage ends; `may_end_early`, within an epoch.
        num_steps: optimizer steps until then; None if the loaders do not tell.
        has_told_steps: whether somebody asked for that number.
        weight_units: of the batches' weights.
        checked_batch_sizes, compared_streams: keys of loaders whose first batch was checked.
        has_checked_criterion: whether a warning was due that batches need other weights than their samples.
        miscounted: keys of loaders of which a warning said that a batch counts other samples than they gave.
        misstated_lengths: keys of loaders that gave other numbers of batches than their lengths.
    """

    def __init__(self, given_hooks: Any = None) -> None:
        self.given_hooks = given_hooks
        self.training_model: Any = None
        self.training_modes: dict[str, TrainingModes] = {}
        self.optimized: set[Tensor] = set()
        self.evaluation_weights = EvaluationWeights()
        self.autocast: AbstractContextManager[Any] = nullcontext()
        self.listeners = Listeners()
        self.known_callbacks: list[ICallback] = []
        self.step_watch: step_watch.StepWatch | None = None
        self.budget = Budget(num_epochs=1)
        self.may_end_early = False
        self.num_steps: int | None = None
        self.has_told_steps = False
        self.weight_units = WeightUnits()
        self.checked_batch_sizes: set[str] = set()
        self.compared_streams: set[str] = set()
        self.miscounted: set[str] = set()
        self.misstated_lengths: set[str] = set()
        self.has_checked_criterion = False

    def hooks_of(self, runner: IRunner) -> Any:
        """Return the object whose hooks make the components.

        The runner is passed in: if its stage referred to it, its loaders and their workers would outlive it until
        garbage is collected.
        """
        return self.given_hooks or runner

    def hears(self, listener: IListener, event: str) -> bool:
        """Return whether a listener gets an event: all do, except in an evaluation within another run."""
        return self.given_hooks is None or self.given_hooks.hears(listener, event)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return a stage for a copy of the runner: the same model, with listeners to be bound to the copy."""
        copied = type(self)(self.given_hooks)
        copied.training_model, copied.autocast = self.training_model, self.autocast
        copied.checked_batch_sizes, copied.compared_streams = self.checked_batch_sizes, self.compared_streams
        return copied


def active(runner: IRunner, callbacks: Iterable[ICallback]) -> list[ICallback]:
    """Return the callbacks that run in this process, in order."""
    rank = runner.engine.rank if runner.engine is not None else 0
    return sorted((each for each in callbacks if CallbackNode(each.node).includes(rank)), key=lambda each: each.order)


def setup_stage(runner: IRunner, stage: str) -> bool:
    """Make and check the components of a stage; return False if the run resumes in a later stage."""
    leave_stage(runner)
    runner.stage_key = stage
    runner._stage.budget = budget_of(call_hook(runner._stage.hooks_of(runner).get_stage_len, stage=stage))
    runner.stage_epoch_len = runner._stage.budget.num_epochs
    runner._stage.may_end_early = runner._stage.budget.limits != ["num_epochs"]
    runner._loader_run.position.start_stage(runner)
    runner.need_early_stop = False
    runner._stage.weight_units = WeightUnits()
    if runner._stage.given_hooks is None:
        runner.engine.loss_factor = None  # an exception may have left one
    runner._stage.has_told_steps = runner._stage.has_checked_criterion = False
    _make_loaders(runner, stage)
    _make_model(runner, stage)
    _check_trains(runner, stage)
    runner.callbacks = dict(call_hook(runner._stage.hooks_of(runner).get_callbacks, stage=stage))
    checks.check_callbacks(runner.callbacks, runner.loaders)
    _recount_steps(runner)
    runner._logs.claim(runner, map(innermost, runner.callbacks.values()))  # before anything in the logdir is read
    if not resume_point.find(runner, stage):
        return False
    # All ranks made the same components. From now on their random numbers (dropout, augmentation) differ.
    if rank := runner.engine.data_parallel.rank:
        set_global_seed(derive_seed(runner.seed, "rank", rank))
    known = runner._stage.known_callbacks
    new = [each for each in runner.callbacks.values() if not any(each is other for other in known)]
    checks.warn_of_misspelt(runner, map(innermost, new))
    for callback in active(runner, new):
        known.append(callback)
        if runner._stage.hears(callback, "on_experiment_start"):
            callback.on_experiment_start(runner)
    runner._stage.listeners.bind(runner, runner.callbacks.values())
    runner._stage.step_watch = step_watch.watch_of_stage(runner)
    return True


def _make_loaders(runner: IRunner, stage: str) -> None:
    loaders = checks.check_loaders(call_hook(runner._stage.hooks_of(runner).get_loaders, stage=stage))
    checks.check_samplers(runner, loaders)
    if runner.epoch_steps is not None:
        from runnerkit.data.epoch_steps import EpochStepsLoaderWrapper  # late, as few runs need it

        for key in (each for each in loaders if is_training(runner, each)):
            loaders[key] = EpochStepsLoaderWrapper(loaders[key], runner.epoch_steps)
    runner.loaders = {
        key: runner.engine.prepare_loader(loader, key=key, training=is_training(runner, key), seed=runner.seed)
        for key, loader in loaders.items()
    }
    checks.check_shares(runner)
    runner._stage.num_steps = count_steps(runner, {runner.accumulation_steps})


def _check_trains(runner: IRunner, stage: str) -> None:
    if runner._stage.given_hooks is not None:
        return  # an evaluation
    words = checks.check_trains(runner.loaders, has_optimizer=runner.optimizer is not None, stage=stage)
    if words is not None and runner.engine.is_main_process:
        logger.warning("stage %r trains nothing: %s", stage, words)


def _recount_steps(runner: IRunner) -> None:
    """Tell the callbacks how many batches to accumulate, and count the stage's steps with what they do.

    Raises:
        ValueError: they take other steps than the scheduler was made for.
    """
    steppers = optimizer_callbacks(runner.callbacks)
    clips = runner.gradient_clip is not None and not runner.steps_itself  # learn() clips
    knobs = {"gradient_clip": clips, "accumulation_steps": runner.accumulation_steps > 1}
    unused = [name for name, is_set in knobs.items() if is_set]
    if unused and not steppers and any(is_training(runner, key) for key in runner.loaders):
        raise ValueError(
            f"{unused[0]} acts on an OptimizerCallback, and the run has none: add OptimizerCallback and "
            "BackwardCallback, or do it in handle_batch; learn() takes gradient_clip, with steps_itself = True"
        )
    for each in steppers:
        own = each.own_accumulation_steps
        each.accumulation_steps = own if own > 1 else runner.accumulation_steps
    told = runner._stage.num_steps
    runner._stage.num_steps = count_steps(runner, paces_of(runner))
    if runner._stage.has_told_steps and told != runner._stage.num_steps:
        raise ValueError(
            f"num_steps was {told} when the scheduler was made, but the OptimizerCallback accumulates "
            f"{accumulation_of(runner)} batches, which gives {runner._stage.num_steps} steps: set "
            f"accumulation_steps = {accumulation_of(runner)} on the runner, or pass it to train(), not to the callback"
        )


def _make_model(runner: IRunner, stage: str) -> None:
    engine = runner.engine
    hooks = runner._stage.hooks_of(runner)
    with engine.making_model(seed=runner.seed):
        model = call_hook(hooks.get_model, stage=stage)
    runner.model = like(model, {key: engine.prepare_model(each) for key, each in as_dict(model).items()})
    runner.criterion = call_hook(hooks.get_criterion, stage=stage)
    for criterion in as_dict(runner.criterion).values():
        if isinstance(criterion, nn.Module):
            criterion.to(engine.device)
    is_infer = stage.startswith("infer")
    runner.optimizer = None if is_infer else call_hook(hooks.get_optimizer, stage=stage, model=runner.model)
    parameter_checks.check_optimizer(runner.optimizer, runner.model, runner.criterion)
    parameter_checks.check_criterion(runner.criterion, engine, loss_reduction=runner.loss_reduction)
    bare = as_dict(runner.optimizer)
    models, optimizers = engine.prepare(as_dict(runner.model), bare)
    runner._stage.training_model, runner.optimizer = like(model, models), like(runner.optimizer, optimizers)
    runner.scheduler = None
    if not is_infer:
        runner.scheduler = call_hook(hooks.get_scheduler, stage=stage, optimizer=runner.optimizer)
        checks.check_scheduler(
            runner.scheduler, {**bare, **{f"prepared {key}": each for key, each in optimizers.items()}}
        )
    _bind_schedulers(runner, {id(each): optimizers[key] for key, each in bare.items()})
    runner._stage.optimized = {*parameter_checks.parameters_of(optimizers)}
    for optimizer in optimizers.values():
        engine.precision.watch(optimizer)
    runner._stage.evaluation_weights = EvaluationWeights(optimizers.values())
    trains = any(is_training(runner, key) for key in runner.loaders)
    runner._stage.training_modes = {
        key: TrainingModes(each, engine.trained_module(each)) for key, each in models.items() if trains
    }


def _bind_schedulers(runner: IRunner, prepared: dict[int, Any]) -> None:
    """Let schedulers created for the user's optimizer act on the one that the engine prepared."""
    schedulers = list(as_dict(runner.scheduler).values())
    for scheduler in schedulers:  # and nested ones: torch's SequentialLR and ChainedScheduler, WarmupLR
        schedulers += inner_schedulers(scheduler)
        optimizer = getattr(scheduler, "optimizer", None)
        if id(optimizer) in prepared and prepared[id(optimizer)] is not optimizer:
            scheduler.optimizer = prepared[id(optimizer)]


def open_loggers(runner: IRunner) -> None:
    """Open the loggers, once, on rank zero, after all input has been checked."""
    if runner._logs.is_open:
        return
    runner._logs.is_open = True
    if not runner.engine.is_main_process:
        return
    resume_point.leave_branch(runner)
    runner.loggers = dict(runner._stage.hooks_of(runner).get_loggers())
    runner._logs.open(runner, resumed_at=resume_point.logged_step(runner))


def leave_stage(runner: IRunner) -> None:
    """Unwrap the user's model and optimizer from the objects that the engine prepared."""
    if runner._stage.training_model is None:
        return
    trained, runner._stage.training_model = runner._stage.training_model, None
    runner._stage.evaluation_weights = EvaluationWeights()
    runner._stage.training_modes = {}  # they hold the wrapped models, and these the process group
    runner._stage.optimized = set()
    if runner.exception is not None:  # no collectives after a failure
        runner.model = like(trained, {key: runner.engine.unwrap(each) for key, each in as_dict(trained).items()})
        return
    bare = as_dict(runner.optimizer)
    models, optimizers = runner.engine.release(as_dict(trained), bare)
    _bind_schedulers(runner, {id(each): optimizers[key] for key, each in bare.items()})
    runner.model, runner.optimizer = like(trained, models), like(runner.optimizer, optimizers)
