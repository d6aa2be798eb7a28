"""The contract of a callback: what happens around a batch, in which order, on which ranks."""

from __future__ import annotations

from abc import ABC
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING

from runnerkit.fused_reduction import Share
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

EVENTS = (
    "on_experiment_start",
    "on_stage_start",
    "on_epoch_start",
    "on_loader_start",
    "on_batch_start",
    "on_batch_end",
    "on_loader_end",
    "on_validation_end",
    "on_step_end",
    "on_epoch_end",
    "on_stage_end",
    "on_experiment_end",
    "on_exception",
)


class CallbackOrder(IntEnum):
    """Who comes first within one event; any int is fine between these."""

    Internal = 0
    Metric = 20
    MetricAggregation = 40
    Backward = 50
    Optimizer = 60
    Scheduler = 80
    Checkpoint = 90
    External = 100


class CallbackNode(IntEnum):
    """The processes that a callback runs in; one that enters collectives must run in all."""

    All = 0
    Master = 1
    Worker = 2

    def includes(self, rank: int) -> bool:
        """Whether the process of that rank is among them."""
        return self is CallbackNode.All or (self is CallbackNode.Master) == (rank == 0)


class IListener(ABC):
    """Whoever listens to the events of a run: override those needed, the others are never called.

    Every event gets the runner, whose attributes say where the run stands.
    """

    def on_experiment_start(self, runner: IRunner) -> None:
        """Once, in every process, the engine being set up."""

    def on_stage_start(self, runner: IRunner) -> None:
        """The stage's components are made."""

    def on_epoch_start(self, runner: IRunner) -> None:
        """A pass over all loaders begins."""

    def on_loader_start(self, runner: IRunner) -> None:
        """A pass over one loader begins."""

    def on_batch_start(self, runner: IRunner) -> None:
        """The batch is on the device."""

    def on_batch_end(self, runner: IRunner) -> None:
        """``handle_batch`` is done: criterion, metrics, backward, optimizer and scheduler act here."""

    def on_loader_end(self, runner: IRunner) -> None:
        """``runner.loader_metrics`` holds the values over all processes."""

    def on_validation_end(self, runner: IRunner) -> None:
        """The evaluation loaders were run in the middle of an epoch (``valid_every_steps``)."""

    def on_step_end(self, runner: IRunner) -> None:
        """A training batch is all accounted for, a validation that was due after it too: the place to save."""

    def on_epoch_end(self, runner: IRunner) -> None:
        """``runner.epoch_metrics`` holds the values of every loader."""

    def on_stage_end(self, runner: IRunner) -> None:
        """The stage's last epoch is over."""

    def on_experiment_end(self, runner: IRunner) -> None:
        """Once, in every process, when all stages went well."""

    def on_exception(self, runner: IRunner) -> None:
        """``runner.exception`` was raised in this process; afterwards it goes on its way."""

    def listens_to(self, event: str) -> bool:
        """Whether `event` is overridden, by the class or on the object; worked out once a stage."""
        return getattr(getattr(self, event), "__func__", None) is not getattr(IListener, event)


class ICallback(IListener):
    """A part of a run that listens to its events and may have state.

    Attributes:
        order: place among the callbacks of one event, small first.
        node: the processes it runs in.
        provides: names of the metrics that it writes, as far as it knows them before training.
        requires: (loader key, metric key) pairs that it reads; refused before training if misspelt.
        shapes_training: whether it decides what a training run goes through, or tells of it, so that `evaluate_loader`
            leaves it out.
    """

    order: int = CallbackOrder.External
    node: CallbackNode = CallbackNode.All
    provides: tuple[str, ...] = ()
    requires: tuple[tuple[str, str], ...] = ()
    shapes_training: bool = False

    def acts_in_loader(self, runner: IRunner) -> bool:
        """Whether it gets the events of the loader under way; a wrapper decides that for what it wraps."""
        return True

    def state_dict(self) -> StateDict:
        """State for checkpoints, alike on all ranks: tensors, numbers, strings, and lists, tuples, sets, dicts of them.

        NumPy's scalars come back as numbers, its arrays as tensors; what else it holds is refused.
        """
        return {}

    def load_state_dict(self, state: StateDict) -> None:
        """Take back :meth:`state_dict`."""


class Callback(ICallback):
    """The base of callbacks, the user's own too.

    Args:
        order: place among the callbacks of one event, small first.
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
    """Return the callback inside of wrappers (ControlFlowCallback and the like), or itself."""
    while isinstance(inner := getattr(callback, "callback", None), ICallback):
        callback = inner
    return callback


class ICriterionCallback(Callback):
    """A callback that computes a loss."""


class IBackwardCallback(Callback):
    """A callback that computes gradients."""


class IOptimizerCallback(Callback):
    """A callback that steps an optimizer.

    Attributes:
        num_pending: batches whose gradients wait for the step.
    """

    num_pending: int = 0


class ISchedulerCallback(Callback):
    """A callback that steps a learning-rate scheduler."""


class IMetricCallback(Callback):
    """A callback that computes metrics.

    At a loader's end the runner asks each for its share, reduces all shares at once, and hands each the total; so a
    loader's end costs one collective, however many metrics there are. ``on_loader_end`` comes after that.
    Where it does not act (another node, or a wrapper that leaves this loader out) it is not asked.

    Attributes:
        totals_all: whether the total tells the loader's value of all that it `provides`, so that the runner need not
            average what it leaves in ``runner.batch_metrics`` of each batch.
    """

    totals_all: bool = False

    def share(self, runner: IRunner) -> Share | None:
        """Give what this process has seen of the loader that is over; None if that is nothing."""
        return None

    def take_total(self, runner: IRunner, total: Share | None) -> None:
        """Turn what all processes have seen into ``runner.loader_metrics``; None if no process saw anything."""


class ICheckpointCallback(Callback):
    """A callback that saves and restores the run.

    Attributes:
        logdir: where it saves, which one run at a time may.
        resume_runner: checkpoint or logdir that the run goes on from.
        load_best_on_end: whether the stage ends with the weights of the best one.
    """

    logdir: Path | None = None
    resume_runner: str | None = None
    load_best_on_end: bool = False

    def leave_branch(self, source: Path, *, stage: str, place: tuple[int, float]) -> None:
        """Let checkpoints after `source` not count any more: the run goes on from there.

        Rank zero calls, when the run's state is put back and before its logs are cut.

        Args:
            stage: which the run goes on in.
            place: epoch of `source`, and step within it (infinite at its end).
        """


class IStoppingCallback(Callback):
    """A callback that may end the stage after an epoch, and tells of it.

    Attributes:
        has_stopped: whether, by what it has seen and its settings, the stage is over. A resumed run asks again those
            that ended it: their settings may be other ones by now.
    """

    has_stopped: bool = False


class IWeightAverageCallback(Callback):
    """A callback that keeps averages of the weights, which evaluation may see in their place."""

    def judged_weights(self) -> dict[str, StateDict]:
        """Return, by the models' keys, the averages that evaluation sees now; empty where it sees what is trained."""
        return {}
