"""The adapter from metric objects to callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerkit.callbacks.metrics.parts.batch_keys import OF_RUNNER, Keys, keys_of, pick
from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.metrics.metric import Metric
from runnerkit.metrics.reduction import PartialSums
from runnerkit.support.arguments import check_keys
from runnerkit.types import Metrics

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class ObjectMetricCallback(LoaderStateCallback[Metric]):
    """Base class of callbacks that update a metric with each batch and log its values of the loader.

    Args:
        metric: it is copied for each pass over a loader, and never changed.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        keys: keys of ``runner.batch`` whose values are passed to ``metric.update``, by the names of their arguments;
            None is the runner's, if it has one, see :func:`.batch_keys.keys_of`.
    """

    def __init__(self, metric: Metric, *, log_on_batch: bool, **keys: Keys | None) -> None:
        super().__init__()
        for name, key in keys.items():
            check_keys(self, or_none=name in OF_RUNNER, **{name: key})
        self.metric = metric
        self.keys = keys
        self._found: tuple[Keys, ...] | None = None  # in the runner, where they are not given
        self.log_on_batch = log_on_batch
        self.provides = metric.names

    def new_state(self, runner: IRunner) -> Metric:
        return self.metric.copy()

    def on_stage_start(self, runner: IRunner) -> None:
        super().on_stage_start(runner)
        self._found = keys_of(self, runner, self.keys)

    def on_batch_end(self, runner: IRunner) -> None:
        if self._found is None:  # a wrapper may leave out the stage's start
            self._found = keys_of(self, runner, self.keys)
        inputs, named = pick(runner, *self._found, reader=type(self).__name__)
        metric = self.state(runner)
        if self.log_on_batch:
            runner.batch_metrics.update(metric.update_key_value(*inputs, **named))
        else:
            metric.update(*inputs, **named)

    def finish(self, runner: IRunner, state: Metric, total: PartialSums) -> None:
        state.take(total)
        try:
            runner.loader_metrics.update(self.values(state))
        except ValueError as error:
            raise ValueError(f"loader {runner.loader_key!r}: {error}") from None
        if runner.loggers:
            self.show(runner, state)

    def show(self, runner: IRunner, state: Metric) -> None:
        """Log tables and figures of a loader; only the rank with loggers calls this."""

    def values(self, state: Metric) -> Metrics:
        """Compute what is logged of a loader; every rank calls this.

        Raises:
            ValueError: a batch was invalid, if that was not known before.
        """
        return state.compute_key_value()
