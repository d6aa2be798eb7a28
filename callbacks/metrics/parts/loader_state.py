"""State of metric callbacks per running loader: reduced at its end, saved in checkpoints within it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch

from runnerkit.callback import CallbackNode, CallbackOrder, IMetricCallback
from runnerkit.engine import IEngine
from runnerkit.metrics.reduction import PartialSums
from runnerkit.types import StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class LoaderState(Protocol):
    """The data that one process accumulates over one loader."""

    def share(self) -> PartialSums | None:
        """Return the state for the reduction over processes; None without batches."""

    def state_dict(self) -> StateDict:
        """Return a copy on the CPU."""
        ...

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        """Continue from the :meth:`state_dict` of one process, bit for bit, of several, or of none."""


State = TypeVar("State", bound=LoaderState)


class LoaderStateCallback(IMetricCallback, ABC, Generic[State]):
    """Base class of callbacks with one state per loader, since a validation may interrupt the training loader."""

    totals_all = True

    def __init__(self) -> None:
        super().__init__(order=CallbackOrder.Metric)
        self._under_way: dict[str, State] = {}
        self._loaded: StateDict = {}
        self._engine: IEngine | None = None  # while a loader runs

    @abstractmethod
    def new_state(self, runner: IRunner) -> State | None:
        """Create the state for a starting loader; None ignores the loader."""

    @abstractmethod
    def finish(self, runner: IRunner, state: State, total: PartialSums) -> None:
        """Write ``runner.loader_metrics`` from the total over all processes."""

    def on_stage_start(self, runner: IRunner) -> None:
        self._loaded = {}

    def on_exception(self, runner: IRunner) -> None:
        self._under_way.clear()  # not at a stage's start: an evaluation within a loader is a stage too

    def state(self, runner: IRunner) -> State:
        """Return the state of the running loader, created now if the callback was enabled within the loader."""
        if runner.loader_key not in self._under_way:
            self._begin(runner)
        return self._under_way[runner.loader_key]

    def _begin(self, runner: IRunner) -> State | None:
        state = self.new_state(runner)
        if state is not None:
            self._engine = runner.engine
            self._under_way[runner.loader_key] = state
        return state

    def on_loader_start(self, runner: IRunner) -> None:
        state = self._begin(runner)
        if state is None:
            return
        of_ranks = self._loaded.pop(runner.loader_key, [])
        if runner.loader_batch_step:  # the loader resumes from a checkpoint
            ranks = runner.engine.data_parallel
            state.load_state_dicts(of_ranks[ranks.rank :: ranks.num_processes], device=runner.engine.device)

    def share(self, runner: IRunner) -> PartialSums | None:
        state = self._under_way.get(runner.loader_key)
        return state.share() if state is not None else None

    def take_total(self, runner: IRunner, total: PartialSums | None) -> None:
        state = self._under_way.pop(runner.loader_key, None)
        if not self._under_way:
            self._engine = None
        if state is not None and total is not None:
            self.finish(runner, state, total)

    def state_dict(self) -> StateDict:
        """Return the states of running loaders, by rank; every rank must call this, because it gathers."""
        if self._engine is None:
            return {}
        if self.node is not CallbackNode.All:  # other ranks do not call this; rank zero saves its own
            return {key: [state.state_dict()] for key, state in self._under_way.items()}
        return {
            key: self._engine.data_parallel.gather_object(state.state_dict()) for key, state in self._under_way.items()
        }

    def load_state_dict(self, state: StateDict) -> None:
        self._loaded = dict(state)
