"""Metrics of batches and loaders: torchmetrics objects, or any function that returns a mean."""

from __future__ import annotations

import re
from abc import ABC
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from runnerkit.callbacks.metrics.parts.batch_keys import Keys, pick
from runnerkit.callbacks.metrics.parts.batch_mean import BatchMeanCallback
from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.callbacks.metrics.parts.metric_state import LoaderMetric, Metric, check_reductions
from runnerkit.metrics.reduction import Share
from runnerkit.support.arguments import check_keys, check_strings
from runnerkit.types import Scalar

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["BatchMetricCallback", "FunctionalBatchMetricCallback", "LoaderMetricCallback"]


class _MetricCallback(LoaderStateCallback[LoaderMetric], ABC):
    logs_on_batch: bool  # unless set by the user

    def __init__(
        self,
        metric: Metric,
        input_key: Keys,
        target_key: Keys,
        log_on_batch: bool | None = None,
        *,
        metric_key: str | None = None,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__()
        missing = [name for name in ("update", "compute", "reset") if not callable(getattr(metric, name, None))]
        if missing or isinstance(metric, type):
            what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}"
            raise TypeError(
                f"{type(self).__name__}: metric must be a torchmetrics object with update, compute and reset, got "
                f"{what}"
            )
        check_keys(self, input_key=input_key, target_key=target_key)
        check_strings(self, or_none=True, metric_key=metric_key, prefix=prefix, suffix=suffix)
        self.metric = metric
        self.input_key, self.target_key = input_key, target_key
        self.log_on_batch = self.logs_on_batch if log_on_batch is None else log_on_batch
        self.metric_key = metric_key
        self.prefix, self.suffix = prefix or "", suffix or ""
        self.provides = self._names()

    def new_state(self, runner: IRunner) -> LoaderMetric:
        if runner.engine.num_processes > 1:
            check_reductions(self.metric)
        return LoaderMetric(self.metric, runner.engine.device)

    def on_batch_end(self, runner: IRunner) -> None:
        args, kwargs = pick(runner, self.input_key, self.target_key, reader=type(self).__name__)
        args = [_detached(value) for value in args]  # a list state would keep every batch's graph
        kwargs = {name: _detached(value) for name, value in kwargs.items()}
        value = self.state(runner).update(args, kwargs, want_value=self.log_on_batch)
        if self.log_on_batch:
            runner.batch_metrics.update(self._scalars(value))

    def finish(self, runner: IRunner, state: LoaderMetric, total: Share) -> None:
        scalars = self._scalars(state.compute(total))
        runner.loader_metrics.update({name: float(each) for name, each in scalars.items()})

    def _names(self) -> tuple[str, ...]:
        names = list(self.metric.keys()) if isinstance(self.metric, nn.ModuleDict) else None
        return tuple(self._scalars(0.0 if names is None else dict.fromkeys(names, 0.0)))

    def _scalars(self, value: Any) -> dict[str, Scalar]:
        if isinstance(value, Mapping):
            group = f"{self.metric_key}/" if self.metric_key else ""
            return {
                key: scalar
                for name, each in value.items()
                for key, scalar in _scalars(f"{self.prefix}{group}{name}{self.suffix}", each).items()
            }
        name = self.metric_key or _snake_case(type(self.metric).__name__)
        return _scalars(f"{self.prefix}{name}{self.suffix}", value)


class BatchMetricCallback(_MetricCallback):
    """A torchmetrics object, computed for each batch and, exactly, for the loader over all processes.

    Each batch costs a call of ``compute()``, which :class:`LoaderMetricCallback` avoids. Construct the metric with
    ``validate_args=False`` if it has that argument: its checks synchronize with the device at every step.

    Args:
        metric: a ``Metric`` or ``MetricCollection``; it is copied and never changed.
        input_key, target_key: keys of ``runner.batch``: a str, a list, or {batch key: keyword of ``update``}.
        log_on_batch: whether ``runner.batch_metrics`` gets the batch's value; True by default.
        metric_key: name to log, by default the metric's class in snake case. Vectors log ``NAME/class_00`` and so on;
            a dict has its own names, to which a given `metric_key` is prepended.
        prefix, suffix: added to the name.

    A single process accepts any object with these three methods:

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
    """A torchmetrics object, computed once per loader over all processes; arguments as in :class:`BatchMetricCallback`.

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


class FunctionalBatchMetricCallback(BatchMeanCallback):
    """A function's value for each batch, and its mean over the loader weighted by batch size, over all processes.

    Args:
        metric_fn: called with inputs and targets; returns a () tensor, the mean over the batch.
        metric_key: name to log.
        input_key, target_key: keys of ``runner.batch``: a str, a list, or {batch key: keyword of `metric_fn`}.
        log_on_batch: whether to put the batch's value into ``runner.batch_metrics``.
        prefix, suffix: added to the name.

    >>> from torch.nn.functional import l1_loss
    >>> FunctionalBatchMetricCallback(l1_loss, "mae", input_key="logits", target_key="targets").provides
    ('mae',)
    """

    def __init__(
        self,
        metric_fn: Callable[..., Tensor],
        metric_key: str,
        input_key: Keys,
        target_key: Keys,
        log_on_batch: bool = True,
        *,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        if not callable(metric_fn):
            raise TypeError(f"{type(self).__name__}: metric_fn must be callable, got {metric_fn!r}")
        check_keys(self, input_key=input_key, target_key=target_key)
        check_strings(self, metric_key=metric_key)
        check_strings(self, or_none=True, prefix=prefix, suffix=suffix)
        self.metric_key = f"{prefix or ''}{metric_key}{suffix or ''}"
        super().__init__((self.metric_key,), log_on_batch=log_on_batch)
        self.metric_fn = metric_fn
        self.input_key, self.target_key = input_key, target_key

    def compute_batch(self, runner: IRunner) -> dict[str, Scalar]:
        args, kwargs = pick(runner, self.input_key, self.target_key, reader=type(self).__name__)
        return {self.metric_key: self.metric_fn(*args, **kwargs)}


def _scalars(name: str, value: Any) -> dict[str, Scalar]:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: value.reshape(())}
    if isinstance(value, Tensor) and value.ndim == 1:
        return {f"{name}/class_{index:02d}": each for index, each in enumerate(value.unbind())}
    if isinstance(value, int | float):
        return {name: value}
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(f"metric {name!r} returned {what}; only a number, a vector or a dict of these can be logged")


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
