"""Metrics that are means over samples, averaged by the runner, or by the callback if batches log nothing."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.metrics.means import LoaderMeans, means_of
from runnerkit.metrics.reduction import PartialSums
from runnerkit.types import Scalar

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class BatchMeanCallback(LoaderStateCallback[LoaderMeans]):
    """Base class of callbacks whose metrics are weighted by batch size, so exact for any number of processes.

    Args:
        provides: the names that :meth:`compute_batch` returns.
        log_on_batch: put them into ``runner.batch_metrics``; False puts them only into ``runner.loader_metrics``.
    """

    def __init__(self, provides: tuple[str, ...], *, log_on_batch: bool) -> None:
        super().__init__()
        self.provides = provides
        self.log_on_batch = log_on_batch
        self.totals_all = not log_on_batch

    @abstractmethod
    def compute_batch(self, runner: IRunner) -> dict[str, Scalar]:
        """Return the means over ``runner.batch``, () tensors on its device."""

    def new_state(self, runner: IRunner) -> LoaderMeans | None:
        return None if self.log_on_batch else LoaderMeans()

    def on_batch_end(self, runner: IRunner) -> None:
        values = self.compute_batch(runner)
        if self.log_on_batch:
            runner.batch_metrics.update(values)
        else:
            self.state(runner).update(values, runner.batch_size, weight=runner.batch_weight)

    def finish(self, runner: IRunner, state: LoaderMeans, total: PartialSums) -> None:
        runner.loader_metrics.update(means_of(total))
