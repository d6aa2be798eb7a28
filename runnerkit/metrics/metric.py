"""Metrics as objects: exact over batches of any size and any number of processes, which they know nothing about."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from runnerkit.metrics.reduction import PartialSums, on_cpu
from runnerkit.support.arguments import check_strings, explain_renamed
from runnerkit.support.host_copy import read_metrics_at_once
from runnerkit.types import Metrics, StateDict, widest_float

__all__ = ["Metric", "SamplesMetric", "SumsMetric"]

Sums = dict[str, Any]  # tensors, or ints known to the host


class Metric(ABC):
    """Base class of metrics; derive from :class:`SumsMetric` or :class:`SamplesMetric`.

    Its state stays on the device of the batches, and `update` does not synchronize with it. Several
    processes each update a metric of their own; merged, these have the values of one metric that saw all samples.

    Args:
        names: of the values.
        prefix, suffix: added to the names, before a slash.

    Attributes:
        names: the names with prefix and suffix.
    """

    def __init__(self, names: Iterable[str], *, prefix: str | None = None, suffix: str | None = None) -> None:
        check_strings(self, or_none=True, prefix=prefix, suffix=suffix)
        if isinstance(names, str):
            raise TypeError(f"{type(self).__name__}: names must be a list of str, got {names!r}")
        self.prefix, self.suffix = prefix or "", suffix or ""
        self.names = tuple(self._named(dict.fromkeys(names)))
        self.reset()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        explain_renamed(cls)

    @abstractmethod
    def reset(self) -> None:
        """Forget all batches."""

    @abstractmethod
    def update(self, *inputs: Any, **named: Any) -> None:
        """Add a batch; the inputs are those of :meth:`update_key_value`."""

    @abstractmethod
    def update_key_value(self, *inputs: Any, **named: Any) -> dict[str, Any]:
        """Add a batch and return its own values by name, () tensors on its device."""

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """True without batches."""

    @abstractmethod
    def share(self) -> PartialSums | None:
        """Return the state for :func:`~runnerkit.metrics.reduction.reduce_sums`; None without batches."""

    @abstractmethod
    def take(self, total: PartialSums) -> None:
        """Replace the state by the total of several metrics' parts."""

    @abstractmethod
    def state_dict(self) -> StateDict:
        """Return a copy of the state on the CPU."""

    @abstractmethod
    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        """Continue from the :meth:`state_dict` of one metric, bit for bit, of several, or of none."""

    @abstractmethod
    def _values(self) -> Sums:
        """Compute the values over all batches, () tensors by name."""

    def compute_key_value(self) -> Metrics:
        """Return the values over all batches by name, with one copy to the host; NaN without batches.

        Raises:
            ValueError: the inputs were invalid, if that was not known before.
        """
        if self.is_empty:
            return dict.fromkeys(self.names, math.nan)
        [values] = read_metrics_at_once([self._named(self._values())])
        return values

    def compute(self) -> Any:
        """Return the values of :meth:`compute_key_value` as a tuple in the order of the names, or the only one."""
        values = tuple(self.compute_key_value().values())
        return values[0] if len(values) == 1 else values

    def merge(self, *others: Metric) -> None:
        """Add the batches of other metrics of the same class and arguments, for example of other processes.

        Raises:
            ValueError: a metric is of another class, or has other names or another number of classes.
        """
        for each in others:
            if type(each) is not type(self) or each.names != self.names:
                raise ValueError(
                    f"{type(self).__name__} of {self.names} cannot be merged with {type(each).__name__} of "
                    f"{each.names if isinstance(each, Metric) else ()}: make both with the same arguments"
                )
        parts = [part for part in (each.share() for each in (self, *others)) if part is not None]
        parts = [part.placed(index, len(parts)) for index, part in enumerate(parts)]
        if parts:
            for name, of_first in parts[0].sums.items():
                for part in parts[1:]:
                    if part.sums[name].shape != of_first.shape:
                        raise unlike(self, of_first.shape, part.sums[name].shape)
            sums = {name: reduce(torch.add, [each.sums[name] for each in parts]) for name in parts[0].sums}
            self.take(PartialSums(sums, [other for each in parts for other in each.others]))

    def copy(self) -> Self:
        """Return a metric of the same arguments without batches."""
        new = copy.deepcopy(self)
        new.reset()
        return new

    def _named(self, values: Sums) -> Sums:
        return named(values, prefix=self.prefix, suffix=self.suffix) if self.prefix or self.suffix else values


class SumsMetric(Metric):
    """Base class of metrics that are computed from sums over samples.

    Inputs may be part of an autograd graph, so :meth:`count` detaches those from which it computes floats.

    >>> class LargeShare(SumsMetric):
    ...     def count(self, values):
    ...         return {"large": (values > 1).sum(), "all": values.numel()}
    ...     def values(self, sums):
    ...         return {"large_share": sums["large"] / sums["all"]}
    >>> metric, other = LargeShare(["large_share"]), LargeShare(["large_share"])
    >>> metric.update(torch.tensor([0.5, 2.0]))
    >>> other.update(torch.tensor([3.0, 4.0]))
    >>> metric.merge(other)
    >>> metric.compute_key_value(), metric.compute()
    ({'large_share': 0.75}, 0.75)
    """

    @abstractmethod
    def count(self, *inputs: Any, **named: Any) -> Sums:
        """Return sums over one batch, on its device: integers, or floats of the widest type; no host sync."""

    @abstractmethod
    def values(self, sums: Sums) -> Sums:
        """Compute the metrics, () tensors by name, from the sums over a batch or over all samples; no host sync."""

    def check_total(self, sums: Sums) -> None:
        """Raise for invalid sums over all samples, when reading them is free."""

    def reset(self) -> None:
        self._sums: Sums = {}

    def update(self, *inputs: Any, **named: Any) -> None:
        self._add(self.count(*inputs, **named))

    def update_key_value(self, *inputs: Any, **named: Any) -> Sums:
        sums = self.count(*inputs, **named)
        self._add(sums)
        values = self.values(sums)
        return self._named(values) if self.prefix or self.suffix else values  # a test instead of a call in each step

    def _add(self, sums: Sums) -> None:
        if not self._sums:
            for name, each in sums.items():
                if isinstance(each, Tensor) and each.requires_grad:
                    raise ValueError(
                        f"{type(self).__name__}.count returned {name!r} with an autograd graph, which would keep the "
                        "graphs of all batches in memory: detach the inputs"
                    )
            self._sums = {**sums}
            return
        for name, each in sums.items():
            if name not in self._sums:  # a checkpoint of another version may lack a sum
                self._sums[name] = each
                continue
            known = self._sums[name]
            if type(each) is type(known) is Tensor and each.shape != known.shape:
                raise unlike(self, known.shape, each.shape)
            self._sums[name] = known + each  # not in place: the first tensor belongs to a batch

    @property
    def is_empty(self) -> bool:
        return not self._sums

    def share(self) -> PartialSums | None:
        return PartialSums({name: torch.as_tensor(each) for name, each in self._sums.items()}) if self._sums else None

    def take(self, total: PartialSums) -> None:
        self._sums = dict(total.sums)

    def state_dict(self) -> StateDict:
        return {name: torch.as_tensor(each).cpu() for name, each in self._sums.items()}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        for state in states:
            if state:
                self._add({name: each.to(device) for name, each in state.items()})

    def _values(self) -> Sums:
        self.check_total(self._sums)
        return self.values(self._sums)


class SamplesMetric(Metric):
    """Base class of metrics that need all samples at once, at the cost of memory and one gather per loader.

    >>> class Median(SamplesMetric):
    ...     def columns(self, values):
    ...         return [values]
    ...     def values(self, values):
    ...         return {"median": values.median()}
    >>> metric = Median(["median"])
    >>> metric.update(torch.tensor([1.0, 9.0]))
    >>> metric.update(torch.tensor([4.0]))
    >>> metric.compute()
    4.0
    """

    @abstractmethod
    def columns(self, *inputs: Any, **named: Any) -> list[Tensor]:
        """Return what to keep of a batch, tensors with one row per sample; raise if it has the wrong shape."""

    @abstractmethod
    def values(self, *columns: Any, **named: Any) -> Sums:
        """Compute the metrics, () tensors by name, from all samples, in any order."""

    def reset(self) -> None:
        self._batches: list[list[Tensor]] = []

    def update(self, *inputs: Any, **named: Any) -> None:
        # A copy: a view would keep its base in memory, for example hidden[:, 0] the hidden states of the whole loader;
        # and the next step overwrites the outputs of a CUDA graph.
        columns = self.columns(*inputs, **named)
        if isinstance(columns, Tensor):
            raise TypeError(f"{type(self).__name__}.columns must return a list of tensors, got a tensor")
        self._batches.append([each.detach().clone(memory_format=torch.contiguous_format) for each in columns])

    def update_key_value(self, *inputs: Any, **named: Any) -> Sums:
        self.update(*inputs, **named)
        return self._named(self.values(*self._batches[-1]))

    @property
    def is_empty(self) -> bool:
        return not self._batches

    def share(self) -> PartialSums | None:
        return PartialSums({}, [self.all_columns()]) if self._batches else None

    def take(self, total: PartialSums) -> None:
        self._batches = list(total.others)

    def state_dict(self) -> StateDict:
        return {"columns": on_cpu(self.all_columns())}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        self._batches = [[each.to(device) for each in state["columns"]] for state in states if state["columns"]]

    def all_columns(self) -> list[Tensor]:
        """Return the columns over all batches."""
        try:
            return [torch.cat(column) for column in zip(*self._batches, strict=True)]
        except RuntimeError:
            shapes = [[tuple(each.shape[1:]) for each in batch] for batch in self._batches]
            other = next((each for each in shapes if each != shapes[0]), None)
            if other is None:
                raise
            raise unlike(self, shapes[0], other) from None

    def _values(self) -> Sums:
        return self.values(*self.all_columns())


def unlike(metric: Metric, first: Any, other: Any) -> ValueError:
    """Return the error for batches that differ in more than their number of samples."""
    return ValueError(
        f"{type(metric).__name__}: batches must have the same number of classes or outputs, got sums or samples of "
        f"shapes {_plain(first)} and {_plain(other)}"
    )


def _plain(shape: Any) -> Any:
    return tuple(shape) if isinstance(shape, torch.Size) else shape


def named(values: Mapping[str, Any], *, prefix: str, suffix: str) -> Sums:
    """Add prefix and suffix to the names.

    >>> list(named({"f1/_macro": torch.zeros(())}, prefix="my_", suffix="_a"))
    ['my_f1_a/_macro']
    """
    parts = {name: name.partition("/") for name in values}
    return {f"{prefix}{head}{suffix}{slash}{tail}": values[name] for name, (head, slash, tail) in parts.items()}


def widest(value: Tensor) -> Tensor:
    """Convert to float64 if the device supports it: an integer times a float would be float32.

    Raises:
        TypeError: the value is complex.
    """
    if value.is_complex():
        raise TypeError(f"expected real numbers, got {value.dtype}: pass abs(), or real and imag as two columns")
    return value.to(widest_float(value.device))


def ratio(numerator: Tensor, denominator: Tensor, *, zero_division: float) -> Tensor:
    """Divide in float64 if the device supports it; x / 0 is `zero_division`."""
    numerator, denominator = widest(numerator), widest(denominator)
    safe = torch.where(denominator == 0, 1, denominator)
    return torch.where(denominator == 0, zero_division, numerator / safe)


def checked_topk(owner: object, topk: int | Iterable[int] | None) -> tuple[int, ...]:
    """Return the distinct values of k; None is 1. Errors name `owner`, or its class.

    Raises:
        TypeError, ValueError: `topk` is empty or a k is not an integer >= 1.

    >>> checked_topk(None, [1, 3, 1])
    (1, 3)
    """
    ks = (1,) if topk is None else tuple(topk) if isinstance(topk, Iterable) else (topk,)
    if not ks or any(not isinstance(k, int) or isinstance(k, bool) or k < 1 for k in ks):
        name = owner if isinstance(owner, str) else type(owner).__name__
        raise ValueError(f"{name}: topk must be integers >= 1, such as (1, 3), got {topk!r}")
    return tuple(dict.fromkeys(ks))
