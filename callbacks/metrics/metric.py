"""Metrics of batches and loaders: metric objects, or any function that returns a mean."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runnerkit.callbacks.metrics.parts.batch_keys import Keys, keys_of, pick
from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.callbacks.metrics.parts.metric_state import ForeignMetric, MetricLike, MetricMembers, check_reductions
from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.metrics.means import LoaderMeans, means_of
from runnerkit.metrics.metric import Metric
from runnerkit.metrics.reduction import PartialSums
from runnerkit.support.arguments import check_keys, check_strings
from runnerkit.support.deprecation import accepts_old_names
from runnerkit.support.function_members import FunctionMembers

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = [
    "BatchMetricCallback",
    "FunctionalBatchMetricCallback",
    "FunctionalMetricCallback",
    "LoaderMetricCallback",
]


class _MetricCallback(ObjectMetricCallback, ABC):
    logs_on_batch: bool  # unless set by the user

    @accepts_old_names(by_position=("log_on_batch",))
    def __init__(
        self,
        metric: Metric | MetricLike,
        input_key: Keys | None = None,
        target_key: Keys | None = None,
        *,
        metric_key: str | None = None,
        log_on_batch: bool | None = None,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        check_strings(self, or_none=True, metric_key=metric_key, prefix=prefix, suffix=suffix)
        super().__init__(
            metric if isinstance(metric, Metric) else self._adapted(metric, metric_key, prefix, suffix),
            log_on_batch=self.logs_on_batch if log_on_batch is None else log_on_batch,
            input_key=input_key,
            target_key=target_key,
        )
        if metric is self.metric and (metric_key or prefix or suffix):
            raise ValueError(f"{type(self).__name__}: pass prefix and suffix to {type(metric).__name__}")

    def _adapted(self, metric: Any, metric_key: str | None, prefix: str | None, suffix: str | None) -> ForeignMetric:
        compute = "compute" if MetricMembers(metric).compute_key_value is None else "compute_key_value"
        missing = [name for name in ("update", compute, "reset") if not callable(getattr(metric, name, None))]
        if missing or isinstance(metric, type):
            what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise TypeError(
                f"{type(self).__name__}: metric must be an object with update, compute and reset, such as "
                f"runnerkit.metrics' or torchmetrics', got {what}"
            )
        name = metric_key or _snake_case(type(metric).__name__)
        return ForeignMetric(metric, name, is_given=metric_key is not None, prefix=prefix, suffix=suffix)

    def new_state(self, runner: IRunner) -> Metric:
        state = super().new_state(runner)
        if isinstance(state, ForeignMetric):
            if runner.engine.num_processes > 1:
                check_reductions(state.metric)
            state.to(runner.engine.device)
        return state


class BatchMetricCallback(_MetricCallback):
    """A metric object, computed for each batch and, exactly, for the loader over all processes.

    Each batch costs a call of ``compute()``, which :class:`LoaderMetricCallback` avoids. Construct the metric with
    ``validate_args=False`` if it has that argument: its checks synchronize with the device at every step.

    Args:
        metric: of runnerkit.metrics or torchmetrics (a ``Metric`` or ``MetricCollection``); it is copied and never
            changed. A single process accepts any object with ``reset``, ``update`` and ``compute``, or with
            ``reset``, ``update``, ``update_key_value`` and ``compute_key_value``.
        input_key, target_key: keys of ``runner.batch``: a str, a list, or {batch key: keyword of ``update``}; by
            default `output_key` and `target_key` of the SupervisedRunner.
        metric_key: name to log, by default the metric's class in snake case. Vectors log ``NAME/class_00`` and so on;
            a dict has its own names, to which a given `metric_key` is prepended.
        log_on_batch: whether ``runner.batch_metrics`` gets the batch's value; True by default.
        prefix, suffix: added to the name.

    >>> import torch
    >>> class LargestError:
    ...     def reset(self):
    ...         self.error = torch.zeros(())
    ...     def update(self, outputs, targets):
    ...         self.error = torch.maximum(self.error, (outputs - targets).abs().max())
    ...     def compute(self):
    ...         return self.error
    >>> callback = BatchMetricCallback(LargestError(), "logits", "targets", prefix="my_")
    >>> callback.provides, callback.log_on_batch
    (('my_largest_error',), True)
    """

    logs_on_batch = True


class LoaderMetricCallback(_MetricCallback):
    """A metric object, computed once per loader over all processes; arguments as in :class:`BatchMetricCallback`.

    `log_on_batch` is False by default.

    >>> class NumSamples:
    ...     def reset(self):
    ...         self.count = 0
    ...     def update(self, targets):
    ...         self.count += len(targets)
    ...     def compute(self):
    ...         return self.count
    >>> callback = LoaderMetricCallback(NumSamples(), "targets", [], metric_key="n")
    >>> callback.provides, callback.log_on_batch
    (('n',), False)
    """

    logs_on_batch = False


class FunctionalBatchMetricCallback(LoaderStateCallback[LoaderMeans]):
    """A function's value for each batch, and its mean over the loader weighted by batch size, over all processes.

    Args:
        metric_fn: called with inputs and targets; returns a () tensor, the mean over the batch.
        input_key, target_key: keys of ``runner.batch``: a str, a list, or {batch key: keyword of `metric_fn`}; by
            default `output_key` and `target_key` of the SupervisedRunner.
        metric_key: name to log, by default the function's.
        log_on_batch: whether to put the batch's value into ``runner.batch_metrics``.
        prefix, suffix: added to the name.

    >>> from torch.nn.functional import l1_loss
    >>> FunctionalBatchMetricCallback(l1_loss, input_key="logits", target_key="targets", metric_key="mae").provides
    ('mae',)
    """

    @accepts_old_names(by_position=("metric_key", "input_key", "target_key", "log_on_batch"))
    def __init__(
        self,
        metric_fn: Callable[..., Tensor],
        *,
        input_key: Keys | None = None,
        target_key: Keys | None = None,
        metric_key: str | None = None,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        if not callable(metric_fn):
            raise TypeError(f"{type(self).__name__}: metric_fn must be callable, got {metric_fn!r}")
        check_keys(self, or_none=True, input_key=input_key, target_key=target_key)
        check_strings(self, or_none=True, metric_key=metric_key, prefix=prefix, suffix=suffix)
        name = metric_key or FunctionMembers(metric_fn).own_name or "<lambda>"
        if name == "<lambda>":
            raise TypeError(f"{type(self).__name__}: pass metric_key=, the name to log: {metric_fn!r} has none")
        self.metric_key = f"{prefix or ''}{name}{suffix or ''}"
        super().__init__()
        self.provides = (self.metric_key,)
        self.log_on_batch = log_on_batch
        self.totals_all = self.counts_samples = not log_on_batch
        self.metric_fn = metric_fn
        self.input_key, self.target_key = input_key, target_key
        self._found: tuple[Keys, ...] | None = None  # in the runner, where they are not given

    def on_stage_start(self, runner: IRunner) -> None:
        super().on_stage_start(runner)
        self._found = keys_of(self, runner, {"input_key": self.input_key, "target_key": self.target_key})

    def new_state(self, runner: IRunner) -> LoaderMeans | None:
        return None if self.log_on_batch else LoaderMeans()

    def on_batch_end(self, runner: IRunner) -> None:
        if self._found is None:  # a wrapper may leave out the stage's start
            self._found = keys_of(self, runner, {"input_key": self.input_key, "target_key": self.target_key})
        args, kwargs = pick(runner, *self._found, reader=type(self).__name__)
        value = self.metric_fn(*args, **kwargs)
        if self.log_on_batch:  # the runner averages it
            runner.batch_metrics[self.metric_key] = value
        else:
            self.state(runner).update({self.metric_key: value}, runner.batch_size, weight=runner.batch_weight)

    def finish(self, runner: IRunner, state: LoaderMeans, total: PartialSums) -> None:
        runner.loader_metrics.update(means_of(total))


class FunctionalMetricCallback(FunctionalBatchMetricCallback):
    """:class:`FunctionalBatchMetricCallback` with its arguments in the order of Catalyst.

    >>> from torch.nn.functional import l1_loss
    >>> FunctionalMetricCallback("logits", "targets", l1_loss, "mae").provides
    ('mae',)
    """

    def __init__(
        self,
        input_key: Keys | None,
        target_key: Keys | None,
        metric_fn: Callable[..., Tensor],
        metric_key: str | None = None,
        *,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(
            metric_fn, input_key=input_key, target_key=target_key, metric_key=metric_key, log_on_batch=log_on_batch,
            prefix=prefix, suffix=suffix,
        )  # fmt: skip


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
