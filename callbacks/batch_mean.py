"""Metrics that are means over samples: the runner averages them, or the callback does where batches log nothing."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from runnerkit.callback import CallbackOrder, IMetricCallback
from runnerkit.engine import IEngine
from runnerkit.metrics import LoaderMeans
from runnerkit.types import Scalar, StateDict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class BatchMeanCallback(IMetricCallback):
    """Base of callbacks whose metrics are weighted by batch size, and so exact over any number of processes.

    Args:
        provides: the names that :meth:`compute_batch` gives.
        log_on_batch: put them in ``runner.batch_metrics``; if False they appear in ``runner.loader_metrics`` only.
    """

    def __init__(self, provides: tuple[str, ...], *, log_on_batch: bool) -> None:
        super().__init__(order=CallbackOrder.Metric)
        self.provides = provides
        self.log_on_batch = log_on_batch
        self._under_way: dict[str, LoaderMeans] = {}  # by loader: a validation may come in the middle of another one
        self._loaded: StateDict = {}
        self._engine: IEngine | None = None  # while a loader is under way

    @abstractmethod
    def compute_batch(self, runner: IRunner) -> dict[str, Scalar]:
        """Give the means over ``runner.batch``, () tensors on its device."""

    def on_stage_start(self, runner: IRunner) -> None:
        self._under_way.clear()
        self._loaded = {}

    def on_loader_start(self, runner: IRunner) -> None:
        if self.log_on_batch:
            return
        key, engine = runner.loader_key, runner.engine
        self._engine = engine
        self._under_way[key] = LoaderMeans()
        ranks = self._loaded.pop(key, [])
        if runner.loader_batch_step:  # the loader goes on from a checkpoint
            mine = ranks[engine.rank :: engine.num_processes]
            self._under_way[key].load_state_dicts(mine, device=engine.device)

    def on_batch_end(self, runner: IRunner) -> None:
        values = self.compute_batch(runner)
        if self.log_on_batch:
            runner.batch_metrics.update(values)
        else:
            self._under_way[runner.loader_key].update(values, runner.batch_size)

    def on_loader_end(self, runner: IRunner) -> None:
        if self.log_on_batch:
            return
        key = runner.loader_key
        # every rank must enter: this reduces
        means, _ = self._under_way[key].compute(runner.engine, loader_key=key)
        runner.loader_metrics.update(means)
        del self._under_way[key]
        if not self._under_way:
            self._engine = None

    def state_dict(self) -> StateDict:
        """Sums of the loaders under way, by rank; every rank must call: this gathers."""
        if self._engine is None:
            return {}
        return {key: self._engine.gather_object(means.state_dict()) for key, means in self._under_way.items()}

    def load_state_dict(self, state: StateDict) -> None:
        self._loaded = dict(state)
