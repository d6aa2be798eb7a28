"""Stages: components are made and prepared by the engine, and unwrapped at the end."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor, nn

from runnerkit.callback import ICallback, ISchedulerCallback, innermost, optimizer_callbacks
from runnerkit.loop import checks, parameter_checks
from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.component_checks import check_made_model
from runnerkit.loop.hooks import call_hook
from runnerkit.loop.listeners import Listeners, active
from runnerkit.loop.loader_pass import is_training
from runnerkit.models.evaluation_weights import EvaluationWeights
from runnerkit.models.modes import TrainingModes
from runnerkit.resume.overrides import options_of, put_options
from runnerkit.seeding.generators import derive_seed, set_global_seed
from runnerkit.steps import schedulers
from runnerkit.steps.budget import StageBudget, accumulation_steps_of
from runnerkit.steps.gradient_step import WeightUnits
from runnerkit.steps.step_watch import StepWatch
from runnerkit.support.component_members import SchedulerMembers
from runnerkit.support.torch_internals import inner_schedulers
from runnerkit.types import as_dict, like, parameters_of

if TYPE_CHECKING:
    from runnerkit.callback import IRunner
    from runnerkit.monitor import Monitor

logger = logging.getLogger(__name__)


class Stage(ProcessState):
    """The stage under way, as the engine prepared it.

    Attributes:
        training_model: the model as the engine prepared it, or several by key; None outside a stage.
        training_modes: of each model, by key; empty if nothing trains.
        optimized: the optimizers' parameters when the stage began.
        evaluation_weights: of optimizers that evaluate with others than they train.
        autocast: the engine's context for the forward pass.
        listeners: methods that act on events.
        known_callbacks: callbacks of this stage and of earlier ones that act in this process.
        step_watch: present until the first training loader of the stage has ended.
        budget: when the stage ends.
        monitor: that of the run, with one of the stage's loaders.
        num_steps: optimizer steps until then; None if the loaders do not tell.
        schedule_counts_steps: whether the schedule may be for that number: it was not made before the run.
        made_schedulers: keys of the schedulers that were made by functions of that number.
        rate_factors: what multiplied the rates of the optimizers in their last steps, by key; empty if nothing does.
        weight_units: of the batches' weights.
        left_out_loaders: those that do not run in this epoch, by key, of which checkpoints hold the positions too.
        checked_batch_sizes, compared_streams: keys of loaders whose first batch was checked.
        has_checked_criterion: whether a warning was due that batches need other weights than those of their gradients.
        miscounted: keys of loaders of which a warning said that a batch counts other samples than they gave.
        misstated_lengths: keys of loaders that gave other numbers of batches than their lengths.
    """

    def __init__(self) -> None:
        self.training_model: Any = None
        self.training_modes: dict[str, TrainingModes] = {}
        self.optimized: set[Tensor] = set()
        self.evaluation_weights = EvaluationWeights()
        self.autocast: AbstractContextManager[Any] = nullcontext()
        self.listeners = Listeners()
        self.known_callbacks: list[ICallback] = []
        self.step_watch: StepWatch | None = None
        self.budget = StageBudget(1)
        self.monitor: Monitor | None = None
        self.num_steps: int | None = None
        self.schedule_counts_steps = False
        self.made_schedulers: frozenset[str] = frozenset()
        self.rate_factors: dict[str, float] = {}
        self.weight_units = WeightUnits()
        self.left_out_loaders: dict[str, Any] = {}
        self.checked_batch_sizes: set[str] = set()
        self.compared_streams: set[str] = set()
        self.miscounted: set[str] = set()
        self.misstated_lengths: set[str] = set()
        self.has_checked_criterion = False

    def open(self, runner: IRunner, key: str) -> bool:
        """Make and check the components of a stage; return False if the run resumes in a later stage."""
        run = runner.current_run
        hooks = run.hooks_of(runner)
        self.close(runner)
        runner.stage_key = key
        self.budget = StageBudget(call_hook(hooks.get_stage_len, stage=key))
        runner.stage_epoch_len = self.budget.given.num_epochs
        run.position.start_stage(runner)
        runner.need_early_stop = False
        self.rate_factors = {}
        self.weight_units = WeightUnits()
        if run.given_hooks is None:
            runner.engine.weigh_loss = None  # an exception may have left one
        self.has_checked_criterion = False
        self._make_loaders(runner, hooks)
        bare = self._make_components(runner, hooks)
        options = [options_of(each) for each in as_dict(runner.optimizer).values()]  # a schedule changes them
        self._make_scheduler(runner, hooks, bare)
        if run.given_hooks is None:  # not an evaluation
            self._check_trains(runner)
        self.monitor = None if run.monitor is None else run.monitor.among(runner.loaders)
        callbacks = call_hook(hooks.get_callbacks, stage=key)
        checks.check_callbacks(callbacks, runner.loaders)
        runner.callbacks = dict(callbacks)
        if run.given_hooks is None:
            schedulers.check_stepped(runner)
            parameter_checks.warn_of_lost_weights(runner)
        if self._recount_steps(runner) and self.schedule_counts_steps:
            # The callbacks accumulate batches: the schedule may be for another number of steps than the run takes.
            for optimizer, own in zip(as_dict(runner.optimizer).values(), options, strict=True):
                put_options(optimizer, own)
            self._make_scheduler(runner, hooks, bare)
        run.logs.claim(runner, map(innermost, runner.callbacks.values()))  # before anything in the logdir is read
        if not run.resume_point.find(runner, key):
            return False
        # All ranks made the same components. From now on their random numbers (dropout, augmentation) differ.
        if rank := runner.engine.data_parallel.rank:
            set_global_seed(derive_seed(runner.seed, "rank", rank))
        self._start_callbacks(runner)
        self.listeners.bind(runner, runner.callbacks.values())
        self.step_watch = StepWatch.of_stage(runner)
        return True

    def close(self, runner: IRunner) -> None:
        """Unwrap the user's model and optimizer from the objects that the engine prepared."""
        if self.training_model is None:
            return
        trained, self.training_model = self.training_model, None
        self.evaluation_weights = EvaluationWeights()
        self.training_modes = {}  # they hold the wrapped models, and these the process group
        self.optimized = set()
        if runner.exception is not None:  # no collectives after a failure
            runner.model = like(trained, {key: runner.engine.unwrap(each) for key, each in as_dict(trained).items()})
            return
        bare = as_dict(runner.optimizer)
        models, optimizers = runner.engine.release(as_dict(trained), bare)
        _bind_schedulers(runner.scheduler, {id(each): optimizers[key] for key, each in bare.items()})
        runner.model, runner.optimizer = like(trained, models), like(runner.optimizer, optimizers)

    def use_model(self, runner: IRunner) -> None:
        """Give the runner the model that its loader needs, in the mode that the loader needs."""
        trained = as_dict(self.training_model)
        if runner.is_train_loader:
            models = {key: runner.engine.training_model(model) for key, model in trained.items()}
            self.enter_training()
        else:
            self.evaluation_weights.eval()  # before an engine gathers them
            models = {key: runner.engine.evaluation_model(model) for key, model in trained.items()}
            for modes in self.training_modes.values():
                modes.leave()
            for model in models.values():
                model.eval()
        runner.model = like(self.training_model, models)

    def enter_training(self) -> None:
        """Give the models the weights, and put them into the modes, that they have in training."""
        self.evaluation_weights.train()
        for modes in self.training_modes.values():
            modes.enter()

    def has_schedule_of_steps(self, runner: IRunner) -> bool:
        """Return whether the schedule may be for a number of steps: made in the run, and not only stepped per epoch.

        The user's code may step what a hook made at any time; a function passed to ``train`` was told the number.
        """
        if not self.schedule_counts_steps:
            return False
        if runner.scheduler_interval == "manual":
            return bool(self.made_schedulers)
        steppers = [each for each in map(innermost, runner.callbacks.values()) if isinstance(each, ISchedulerCallback)]
        return not steppers or not all(each.is_per_epoch for each in steppers)

    def of_copy(self) -> Self:
        """Return a stage for a copy of the runner: the same model, with listeners to be bound to the copy."""
        copied = type(self)()
        copied.training_model, copied.autocast = self.training_model, self.autocast
        copied.checked_batch_sizes, copied.compared_streams = self.checked_batch_sizes, self.compared_streams
        return copied

    def _make_loaders(self, runner: IRunner, hooks: Any) -> None:
        stage = runner.stage_key
        loaders = checks.check_loaders(call_hook(hooks.get_loaders, stage=stage))
        checks.check_samplers(loaders, runner.engine)
        if runner.epoch_steps is not None:
            from runnerkit.data.epoch_steps import EpochStepsLoaderWrapper  # late, as few runs need it

            for key in (each for each in loaders if is_training(each, stage)):
                loaders[key] = EpochStepsLoaderWrapper(loaders[key], runner.epoch_steps)
        runner.loaders = {
            key: runner.engine.prepare_loader(loader, key=key, training=is_training(key, stage), seed=runner.seed)
            for key, loader in loaders.items()
        }
        checks.check_shares(runner.loaders, runner.engine)
        self.num_steps = self.budget.count_steps(runner, {runner.accumulation_steps})

    def _make_components(self, runner: IRunner, hooks: Any) -> dict[str, Any]:
        """Make all but the scheduler; return the optimizers as the hook made them."""
        engine, key = runner.engine, runner.stage_key
        with engine.making_model(seed=runner.seed):
            model = call_hook(hooks.get_model, stage=key)
        check_made_model(model)
        runner.model = like(model, {name: engine.prepare_model(each) for name, each in as_dict(model).items()})
        runner.criterion = call_hook(hooks.get_criterion, stage=key)
        for criterion in as_dict(runner.criterion).values():
            if isinstance(criterion, nn.Module):
                criterion.to(engine.device)
        is_infer = key.startswith("infer")
        runner.optimizer = None if is_infer else call_hook(hooks.get_optimizer, stage=key, model=runner.model)
        parameter_checks.check_optimizer(runner.optimizer, runner.model, runner.criterion)
        trains = any(is_training(name, key) for name in runner.loaders)
        parameter_checks.check_criterion(runner.criterion, engine, loss_reduction=runner.loss_reduction, trains=trains)
        bare = as_dict(runner.optimizer)
        models, optimizers = engine.prepare(as_dict(runner.model), bare)
        self.training_model, runner.optimizer = like(model, models), like(runner.optimizer, optimizers)
        self.optimized = {*parameters_of(*optimizers.values())}
        for optimizer in optimizers.values():
            engine.precision.watch(optimizer)
        self.evaluation_weights = EvaluationWeights(optimizers.values())
        self.training_modes = {
            name: TrainingModes(each, engine.trained_module(each)) for name, each in models.items() if trains
        }
        return bare

    def _make_scheduler(self, runner: IRunner, hooks: Any, bare: dict[str, Any]) -> None:
        """Make the scheduler of the prepared optimizer, `bare` before."""
        runner.scheduler, key, self.made_schedulers = None, runner.stage_key, frozenset()
        self.schedule_counts_steps = True  # the hook may use `num_steps`; one that does not says so
        if not key.startswith("infer"):
            runner.scheduler = call_hook(hooks.get_scheduler, stage=key, optimizer=runner.optimizer)
        optimizers = as_dict(runner.optimizer)
        prepared = {f"prepared {name}": each for name, each in optimizers.items()}
        schedulers.check_scheduler(runner.scheduler, {**bare, **prepared})
        _bind_schedulers(runner.scheduler, {id(each): optimizers[name] for name, each in bare.items()})
        self.schedule_counts_steps = self.schedule_counts_steps and runner.scheduler is not None

    def _check_trains(self, runner: IRunner) -> None:
        stage = runner.stage_key
        words = checks.check_trains(runner.loaders, has_optimizer=runner.optimizer is not None, stage=stage)
        if words is not None and runner.engine.is_main_process:
            logger.warning("stage %r trains nothing: %s", stage, words)

    def _recount_steps(self, runner: IRunner) -> bool:
        """Tell the callbacks how many batches to accumulate; return whether the stage's steps are others with these."""
        steppers = optimizer_callbacks(runner.callbacks)
        clips = runner.gradient_clip is not None and not runner.steps_itself  # learn() clips
        knobs = {"gradient_clip": clips, "accumulation_steps": runner.accumulation_steps > 1}
        unused = [name for name, is_set in knobs.items() if is_set]
        if unused and not steppers and any(is_training(key, runner.stage_key) for key in runner.loaders):
            raise ValueError(
                f"{unused[0]} acts on an OptimizerCallback, and the run has none: add OptimizerCallback and "
                "BackwardCallback, or do it in handle_batch; learn() takes gradient_clip, with steps_itself = True"
            )
        for each in steppers:
            own = each.own_accumulation_steps
            each.accumulation_steps = own if own > 1 else runner.accumulation_steps
        before, paces = self.num_steps, accumulation_steps_of(runner.callbacks)
        self.num_steps = self.budget.count_steps(runner, paces)
        return before != self.num_steps

    def _start_callbacks(self, runner: IRunner) -> None:
        """Call ``on_experiment_start`` of the callbacks that earlier stages did not have."""
        known = self.known_callbacks
        new = [each for each in runner.callbacks.values() if not any(each is other for other in known)]
        checks.warn_of_misspelt(map(innermost, new), runner.engine)
        for callback in active(new, runner.engine):
            known.append(callback)
            if runner.current_run.receives(callback, "on_experiment_start"):
                callback.on_experiment_start(runner)


def _bind_schedulers(schedulers: Any, prepared: dict[int, Any]) -> None:
    """Let schedulers created for the user's optimizer act on the one that the engine prepared."""
    bound = list(as_dict(schedulers).values())
    for scheduler in bound:  # and nested ones: torch's SequentialLR and ChainedScheduler, WarmupLR
        bound += inner_schedulers(scheduler)
        optimizer = SchedulerMembers(scheduler).optimizer
        if id(optimizer) in prepared and prepared[id(optimizer)] is not optimizer:
            scheduler.optimizer = prepared[id(optimizer)]
