"""Metrics of scikit-learn, by the names of its functions."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runnerkit.callbacks.metrics.metric import FunctionalBatchMetricCallback
from runnerkit.callbacks.metrics.parts.object_metric import ObjectMetricCallback
from runnerkit.errors import did_you_mean
from runnerkit.metrics.metric import SamplesMetric
from runnerkit.support.arguments import check_flags, check_mappings, check_strings
from runnerkit.support.function_members import FunctionMembers

__all__ = ["SklearnBatchCallback", "SklearnLoaderCallback"]


class _OfTensors:
    """A function of arrays that takes tensors by their keys in a batch, and returns a () tensor."""

    def __init__(self, function: Callable[..., Any], keys: Mapping[str, str], options: Mapping[str, Any]) -> None:
        self.function, self.keys, self.options = function, dict(keys), options
        self.read = [*dict.fromkeys(self.keys.values())]  # once, if several arguments take the same values

    def __call__(self, **batch: Tensor) -> Tensor:
        arrays = {argument: _as_array(batch[key]) for argument, key in self.keys.items()}
        number = np.asarray(self.function(**arrays, **self.options))
        if number.size != 1:
            name = FunctionMembers(self.function).own_name or "the function"
            raise ValueError(f"{name} returned {number.size} numbers, but a metric is one: pass average=, or the like")
        return torch.tensor(number.item(), dtype=torch.float64)


class _SklearnMetric(SamplesMetric):
    def __init__(self, function: _OfTensors, name: str) -> None:
        super().__init__([name])
        self.function, self.name = function, name

    def columns(self, **batch: Tensor) -> list[Tensor]:
        return [torch.as_tensor(batch[key]) for key in self.function.read]

    def values(self, *columns: Tensor) -> dict[str, Tensor]:
        return {self.name: self.function(**dict(zip(self.function.read, columns, strict=True)))}


class SklearnLoaderCallback(ObjectMetricCallback):
    """A metric of scikit-learn over all samples of a loader and of all processes, computed once at the loader's end.

    Args:
        keys: {argument of the function: key of ``runner.batch``}; each value has a row for each sample.
        metric_fn: name of a function of ``sklearn.metrics``, such as "roc_auc_score", or any function of NumPy arrays
            that returns one number.
        metric_key: name to log.
        metric_kwargs: further arguments of the function.
    Raises:
        ImportError: scikit-learn is not installed.
        ValueError: it lacks a function of this name.

    >>> SklearnLoaderCallback({"y_score": "scores", "y_true": "targets"}, "roc_auc_score", "auc").provides
    ('auc',)
    """

    def __init__(
        self, keys: Mapping[str, str], metric_fn: Callable[..., Any] | str, metric_key: str, **metric_kwargs: Any
    ) -> None:
        function = _of_tensors(self, keys, metric_fn, metric_key, metric_kwargs)
        super().__init__(_SklearnMetric(function, metric_key), log_on_batch=False, keys=function.read)


class SklearnBatchCallback(FunctionalBatchMetricCallback):
    """A metric of scikit-learn for each batch, and its mean over the loader weighted by batch size.

    Such a mean is the value over the loader for few metrics, as the accuracy; :class:`SklearnLoaderCallback` computes
    that. Each batch waits for the device.

    Args:
        keys, metric_fn, metric_key, metric_kwargs: see :class:`SklearnLoaderCallback`.
        log_on_batch: whether to put the batch's value into ``runner.batch_metrics``.

    >>> SklearnBatchCallback({"y_pred": "labels", "y_true": "targets"}, "f1_score", "f1", average="macro").provides
    ('f1',)
    """

    def __init__(
        self,
        keys: Mapping[str, str],
        metric_fn: Callable[..., Any] | str,
        metric_key: str,
        log_on_batch: bool = True,
        **metric_kwargs: Any,
    ) -> None:
        check_flags(self, log_on_batch=log_on_batch)
        function = _of_tensors(self, keys, metric_fn, metric_key, metric_kwargs)
        super().__init__(
            function, input_key=function.read, target_key=[], metric_key=metric_key, log_on_batch=log_on_batch
        )


def _of_tensors(owner: Any, keys: Any, metric_fn: Any, metric_key: Any, options: Mapping[str, Any]) -> _OfTensors:
    kind = type(owner).__name__
    check_mappings(kind, keys=keys)
    check_strings(owner, metric_key=metric_key, **keys)
    if callable(metric_fn):
        return _OfTensors(metric_fn, keys, options)
    if not isinstance(metric_fn, str):
        raise TypeError(
            f"{kind}: metric_fn must be a function, or the name of one of sklearn.metrics, got {metric_fn!r}"
        )
    try:
        metrics = importlib.import_module("sklearn.metrics")
    except ImportError:
        raise ImportError(f"{kind} needs scikit-learn: pip install scikit-learn") from None
    if metric_fn not in metrics.__all__:
        raise ValueError(f"sklearn.metrics lacks {metric_fn!r}" + did_you_mean(metric_fn, metrics.__all__))
    return _OfTensors(getattr(metrics, metric_fn), keys, options)


def _as_array(values: Any) -> np.ndarray[Any, Any]:
    tensor = torch.as_tensor(values).detach()
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).cpu().numpy()
    return array
