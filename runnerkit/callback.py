"""The interface of callbacks: their events, order and processes."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING

from runnerkit.metrics.reduction import PartialSums
from runnerkit.monitor import Monitor, MonitorPart
from runnerkit.support.arguments import explain_renamed
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner as IRunner  # the only import cycle; the loop imports IRunner from here

__all__ = [
    "Callback",
    "CallbackNode",
    "CallbackOrder",
    "IBackwardCallback",
    "ICallback",
    "ICheckpointCallback",
    "ICriterionCallback",
    "IMetricCallback",
    "IOptimizerCallback",
    "ISchedulerCallback",
]


class CallbackOrder(IntEnum):
    """The order of callbacks within one event; any int in between is valid. Names are the same in lower case.

    In ``on_step_end`` and ``on_epoch_end`` a callback that saves checkpoints comes last, whatever its order.
    """

    Internal = internal = 0
    Metric = metric = 20
    MetricAggregation = metric_aggregation = 40
    Backward = backward = 50
    Optimizer = optimizer = 60
    Scheduler = scheduler = 80
    Checkpoint = checkpoint = 90
    External = external = 100
    ExternalExtra = external_extra = 120


class CallbackNode(IntEnum):
    """The processes that a callback runs in; a callback with collectives must run in all. Also in lower case."""

    All = all = 0
    Master = master = 1
    Worker = worker = 2

    def includes(self, rank: int) -> bool:
        """Check if the callback runs in the process with this rank."""
        return self is CallbackNode.All or (self is CallbackNode.Master) == (rank == 0)


class IListener(ABC):
    """A listener to the events of a run; only overridden methods are called.

    Every event gets the runner, whose attributes give the current position of the run.
    """

    def on_experiment_start(self, runner: IRunner) -> None:
        """Called once in every process, after the engine is set up, and for callbacks also their first stage."""

    def on_stage_start(self, runner: IRunner) -> None:
        """Called after the components of the stage are created."""

    def on_epoch_start(self, runner: IRunner) -> None:
        """Called before a pass over all loaders."""

    def on_loader_start(self, runner: IRunner) -> None:
        """Called before a pass over one loader."""

    def on_batch_start(self, runner: IRunner) -> None:
        """Called when the batch is on the device."""

    def on_batch_end(self, runner: IRunner) -> None:
        """Called after ``handle_batch``; criterion, metrics, backward, optimizer and scheduler callbacks act here."""

    def on_loader_end(self, runner: IRunner) -> None:
        """Called after a pass over one loader; ``runner.loader_metrics`` has the values over all processes."""

    def on_validation_end(self, runner: IRunner) -> None:
        """Called after the evaluation loaders ran within an epoch (``valid_every_steps``)."""

    def on_step_end(self, runner: IRunner) -> None:
        """Called after an optimizer step and any validation due after it; checkpoints are saved here."""

    def on_epoch_end(self, runner: IRunner) -> None:
        """Called after an epoch; ``runner.epoch_metrics`` has the values of every loader."""

    def on_stage_end(self, runner: IRunner) -> None:
        """Called after the last epoch of the stage."""

    def on_experiment_end(self, runner: IRunner) -> None:
        """Called once in every process after all stages succeeded."""

    def on_exception(self, runner: IRunner) -> None:
        """Called when ``runner.exception`` was raised in this process; it propagates afterwards."""

    def listens_to(self, event: str) -> bool:
        """Check if `event` is overridden by the class or on the object; called once per stage."""
        method = method_of(self, event)
        return not isinstance(method, MethodType) or method.__func__ is not vars(IListener)[event]


EVENTS = tuple(name for name in vars(IListener) if name.startswith("on_"))


def method_of(listener: IListener, event: str) -> Callable[[IRunner], None]:
    """Return the method of `listener` that acts on `event`, one of the events."""
    method: Callable[[IRunner], None] = getattr(listener, event)
    return method


class ICallback(IListener):
    """A listener to the events of a run that may have state.

    Attributes:
        order: order among the callbacks of one event, ascending.
        node: the processes it runs in.
        provides: names of the metrics that it writes, if they are known before training.
        requires: (loader key, metric key) pairs that it reads; unknown ones raise before training.
        shapes_training: True if it controls or reports on training; `evaluate_loader` then omits it.
        changes_weights: True if it changes weights after an evaluation, as a checkpoint with the score needs those
            before; assumed of classes outside of runnerkit.
        callback: the wrapped callback, in a wrapper such as ControlFlowCallback.
    """

    order: int = CallbackOrder.External
    node: CallbackNode = CallbackNode.All
    provides: tuple[str, ...] = ()
    requires: tuple[tuple[str, str], ...] = ()
    shapes_training: bool = False
    changes_weights: bool = False
    callback: ICallback | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        explain_renamed(cls)

    def acts_in_loader(self, runner: IRunner) -> bool:
        """Check if it gets the events of the current loader; a wrapper decides for the callback that it wraps."""
        return True

    def state_dict(self) -> StateDict:
        """Return the state for checkpoints, the same on all ranks; rank zero's is saved.

        It may contain tensors, numbers, strings, and lists, tuples, sets and dicts of them. NumPy scalars are restored
        as numbers, NumPy arrays as tensors. Any other type raises an error.
        """
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Load a :meth:`state_dict`."""


class Callback(ICallback):
    """The base class of callbacks, also of user-defined ones.

    Args:
        order: order among the callbacks of one event, ascending.
        node: the processes it runs in.

    >>> class Hello(Callback):
    ...     def on_epoch_start(self, runner):
    ...         print("epoch", runner.epoch_step)
    >>> Hello(order=CallbackOrder.External).order
    <CallbackOrder.External: 100>
    """

    def __init__(self, order: int = CallbackOrder.External, node: CallbackNode = CallbackNode.All) -> None:
        self.order = order
        self.node = node


def innermost(callback: ICallback) -> ICallback:
    """Return the callback inside of wrappers such as ControlFlowCallback, or `callback` itself."""
    while isinstance(callback, ICallback) and isinstance(callback.callback, ICallback):
        callback = callback.callback
    return callback


def outermost(callback: ICallback, callbacks: Iterable[ICallback]) -> ICallback:
    """Return the one of `callbacks` that `callback` is, or that wraps it and says when it acts; otherwise itself."""
    return next((each for each in callbacks if innermost(each) is callback), callback)


class ICriterionCallback(Callback):
    """A callback that computes a loss."""


class IBackwardCallback(Callback):
    """A callback that computes gradients."""


class IOptimizerCallback(Callback):
    """A callback that steps an optimizer.

    Attributes:
        own_accumulation_steps: batches whose gradients are averaged into one step; 1 leaves it to the runner.
        accumulation_steps: the resulting number, once a stage has started.
        metric_key: name of the loss whose gradients it steps on.
        num_pending: batches whose gradients are accumulated for the next step.
    """

    own_accumulation_steps: int = 1
    accumulation_steps: int = 1
    metric_key: str = "loss"
    num_pending: int = 0


def last_training_loader(loaders: Iterable[str]) -> str:
    """Return the key of the training loader that ends an epoch's training."""
    return [key for key in loaders if key.startswith("train")][-1]


def optimizer_callbacks(callbacks: Mapping[str, ICallback]) -> list[IOptimizerCallback]:
    """Return the callbacks that step an optimizer, without their wrappers."""
    return [each for each in map(innermost, callbacks.values()) if isinstance(each, IOptimizerCallback)]


class ISchedulerCallback(Callback):
    """A callback that steps the learning-rate scheduler of its `scheduler_key`, or all of them if it has none.

    Attributes:
        is_per_epoch: whether it steps after epochs only; known when the stage has started.
    """

    is_per_epoch = False


class IMetricCallback(Callback):
    """A callback that computes metrics.

    At the end of a loader the runner calls `share` of each, reduces all of them together, and passes the
    totals to `take_total`, before ``on_loader_end``. Callbacks that do not act on this loader (another `node`, or a
    wrapper that excludes it) are skipped.

    Attributes:
        totals_all: True if the total gives the loader's values of all metrics that it `provides`, so the runner does
            not average their values in ``runner.batch_metrics``.
        counts_samples: True if it adds up the samples of batches. It then gets no ``on_batch_end`` of a batch whose
            samples belong to another process (docs/data.md).
    """

    totals_all: bool = False
    counts_samples: bool = True

    def share(self, runner: IRunner) -> PartialSums | None:
        """Return the sums of this process over the finished loader; None if it has seen nothing."""
        return None

    def take_total(self, runner: IRunner, total: PartialSums | None) -> None:
        """Compute ``runner.loader_metrics`` from the total over all processes; None if none has seen anything."""


class ICheckpointCallback(Callback):
    """A callback that saves and restores the run, in ``on_step_end`` and ``on_epoch_end``, where it comes last.

    Attributes:
        logdir: folder of the checkpoints; only one run at a time may use it.
        resume_runner: checkpoint or logdir that the run resumes from.
        load_best_on_end: load the best weights at the end of the stage.
        load_best_of_run: the same, as `train` of the runner was asked to.
        monitor: the metric that selects the best checkpoint; None without one.
        loader_key, metric_key, minimize: its parts; None without one.
    """

    monitor: Monitor | None = None
    loader_key = MonitorPart[str | None]("loader")
    metric_key = MonitorPart[str | None]("metric")
    minimize = MonitorPart[bool | None]("minimize")
    logdir: Path | None = None
    resume_runner: str | None = None
    load_best_on_end: bool = False
    load_best_of_run: bool = False

    def keep_scored_weights(self, runner: IRunner) -> None:
        """Keep the weights that a loader evaluated, if they may change before they are saved with its score.

        Called at the end of each loader, before any ``on_loader_end``.
        """

    def leave_branch(self, source: Path, *, stage: str, place: tuple[int, float]) -> None:
        """Invalidate the checkpoints after `source`, from which the run resumes.

        Called on rank zero after the run's state is restored and before its logs are truncated.

        Args:
            stage: the stage in which the run resumes.
            place: epoch of `source`, and step within it (infinite at its end).
        """


def monitor_of_savers(callbacks: Mapping[str, ICallback]) -> Monitor | None:
    """Return what selects the best checkpoint of the callbacks that save, if any of them keeps one."""
    savers = [each for each in map(innermost, callbacks.values()) if isinstance(each, ICheckpointCallback)]
    for each in savers:  # a user's own may have the parts without a `monitor`
        if each.loader_key is not None and each.metric_key is not None:
            return Monitor(each.loader_key, each.metric_key, each.minimize)
    return None


class IStoppingCallback(Callback):
    """A callback that may end the stage after an epoch.

    Attributes:
        has_stopped: True if the stage is over according to its state and settings. A resumed run checks it again for
            the callbacks that ended the stage, since their settings may have changed.
    """

    has_stopped: bool = False


class IWeightAverageCallback(Callback):
    """A callback that keeps averages of the weights, which evaluation may use instead of the trained ones."""

    def judged_weights(self) -> dict[str, StateDict]:
        """Return the averages that evaluation uses now, by model key; empty if it uses the trained weights.

        Averages of sharded weights are sharded in the same way.
        """
        return {}
