"""Metric objects of other libraries, whose states are reduced over all processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runnerkit.metrics.metric import Metric, Sums
from runnerkit.metrics.reduction import PartialSums, on_cpu
from runnerkit.support.device_move import move
from runnerkit.support.function_members import FunctionMembers
from runnerkit.support.members import Member, Members
from runnerkit.types import StateDict

Part = list[StateDict]  # of one process: the states of each Metric within a metric, in order


class MetricLike(Protocol):
    """The interface of a torchmetrics ``Metric`` or ``MetricCollection``."""

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Add a batch."""

    def compute(self) -> Any:
        """Return the value over all batches since the last reset."""

    def reset(self) -> None:
        """Forget all batches."""


class MetricMembers(Members):
    """Members of metric objects with the key-value protocol.

    Attributes:
        update_key_value: adds a batch and returns its values by name; torchmetrics' objects are called for that.
        compute_key_value: returns the values over all batches by name.
    """

    update_key_value = Member[Callable[..., Any] | None](None)
    compute_key_value = Member[Callable[[], Mapping[str, Any]] | None](None)


class ForeignMetric(Metric):
    """The adapter from other libraries' metric objects to :class:`~runnerkit.metrics.Metric`.

    It does not use torchmetrics' own synchronization, which enters one collective per element of a list state, so ranks
    with different numbers of batches hang, and which includes the empty state of a rank without batches. Neither does
    it use ``merge_state``, which raises for every metric whose ``full_state_update`` is not False.

    Args:
        metric: the object; it is changed.
        name: of a single value; it precedes the names of a dict if `is_given`.
    """

    def __init__(
        self, metric: MetricLike, name: str, *, is_given: bool, prefix: str | None, suffix: str | None
    ) -> None:
        self.metric: Any = metric
        self.name, self.group = name, f"{name}/" if is_given else ""
        self._device = torch.device("cpu")
        names = list(metric.keys()) if isinstance(metric, nn.ModuleDict) else None
        are_known = MetricMembers(metric).compute_key_value is None  # else they are known once it has values
        values = self._scalars(0.0 if names is None else dict.fromkeys(names, 0.0)) if are_known else {}
        super().__init__(values, prefix=prefix, suffix=suffix)

    def to(self, device: torch.device) -> None:
        """Move the metric and let it no longer reduce its states itself."""
        self._device = device
        if isinstance(self.metric, nn.Module):
            self.metric.to(device)
        for each in _inner_metrics(self.metric):
            each.distributed_available_fn = _never

    def reset(self) -> None:
        self.metric.reset()
        self._inner = _inner_metrics(self.metric)
        self._is_empty = True
        self._inherited: list[Part] = []  # of other ranks, if a run resumes on fewer processes

    def update(self, *inputs: Any, **named: Any) -> None:
        self._is_empty = False
        args, kwargs = _detached(inputs, named)
        self.metric.update(*args, **kwargs)

    def update_key_value(self, *inputs: Any, **named: Any) -> Sums:
        self._is_empty = False
        args, kwargs = _detached(inputs, named)
        update = MetricMembers(self.metric).update_key_value
        values = (self.metric if update is None else update)(*args, **kwargs)
        return self._named(self._scalars(values))

    @property
    def is_empty(self) -> bool:
        return not self._parts()

    def share(self) -> PartialSums | None:
        """Return the states, with those reduced by "sum" as sums; None without batches."""
        parts = self._parts()
        if not parts:
            return None
        sums: dict[str, Tensor] = {}
        others: list[Part] = [[{} for _ in self._inner] for _ in parts]
        for index, metric in enumerate(self._inner):
            for name in parts[0][index]:
                values = [part[index][name] for part in parts]
                if _adds_up(metric._reductions[name], values[0]):
                    total: Any = sum(each.to(self._device) for each in values)
                    sums[f"{index}.{name}"] = total
                    continue
                for other, value in zip(others, values, strict=True):
                    other[index][name] = value
        return PartialSums(sums, others if any(others[0]) else [])

    def take(self, total: PartialSums) -> None:
        """Replace the states by those of all processes.

        Raises:
            ValueError: a state reduced by "mean" differs between processes.
        """
        for index, metric in enumerate(self._inner):
            of_parts = [part[index] for part in total.others]
            states = {name.partition(".")[2]: each for name, each in total.sums.items() if name.startswith(f"{index}.")}
            states |= {
                name: _merge(metric, name, [part[name] for part in of_parts])
                for name in (of_parts[0] if of_parts else ())
            }
            self._put(metric, states)
        self._is_empty, self._inherited = False, []

    def _values(self) -> Sums:
        key_value = MetricMembers(self.metric).compute_key_value
        return self._scalars(self.metric.compute() if key_value is None else key_value())

    def state_dict(self) -> StateDict:
        """Copy the states to the CPU.

        Raises:
            TypeError: the metric does not declare states.
        """
        check_states(self.metric, wanted_to="be saved within an epoch")
        return {"parts": on_cpu(self._parts())}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        parts = [part for state in states for part in state["parts"]]
        if parts:
            for metric, state in zip(self._inner, parts[0], strict=True):
                self._put(metric, state)
            self._is_empty = False
            self._inherited = parts[1:]

    def _parts(self) -> list[Part]:
        own = [] if self._is_empty else [[each.metric_state for each in self._inner]]
        return [*own, *self._inherited]

    def _put(self, metric: Any, states: StateDict) -> None:
        for name, state in states.items():
            setattr(metric, name, move(state, self._device))
        metric._update_count = max(metric._update_count, 1)  # or compute() warns on a rank without batches

    def _scalars(self, value: Any) -> Sums:
        if isinstance(value, Mapping):
            parts = [_scalars(f"{self.group}{name}", each) for name, each in value.items()]
            return {name: each for part in parts for name, each in part.items()}
        return _scalars(self.name, value)


def check_states(metric: MetricLike, *, wanted_to: str) -> None:
    """Raise if the states of a metric are unknown.

    Raises:
        TypeError: the object is not a torchmetrics metric.
    """
    if not _inner_metrics(metric):
        raise TypeError(
            f"{type(metric).__name__} is not a torchmetrics Metric, so its state cannot {wanted_to}; "
            "derive it from runnerkit.metrics.SumsMetric, or from torchmetrics.Metric with add_state"
        )


def check_reductions(metric: MetricLike) -> None:
    """Raise if the value of a metric over several processes may be wrong.

    Raises:
        TypeError: the object is not a torchmetrics metric.
        ValueError: a state has a custom reduction function.
    """
    check_states(metric, wanted_to="be reduced over processes")
    for each in _inner_metrics(metric):
        for name, reduction in each._reductions.items():
            is_list = isinstance(each._defaults[name], list)  # concatenated for any reduction
            if reduction is not None and not is_list and _name_of(reduction) not in _REDUCTIONS:
                raise ValueError(
                    f"{_state_of(each, name)} has dist_reduce_fx={_name_of(reduction)}, which may not "
                    f"give the value of one process; {_USE_SUMS}, or use dist_reduce_fx=None and merge the "
                    "(ranks, ...) tensor in compute()"
                )


def _inner_metrics(metric: Any) -> list[Any]:
    modules = metric.modules() if isinstance(metric, nn.Module) else ()
    return [module for module in modules if hasattr(module, "_reductions")]


# `_reductions` and `_defaults` are private, but no public attribute distinguishes sum from max.
_REDUCTIONS = {f"dim_zero_{name}" for name in ("sum", "max", "min", "cat", "mean")}
_USE_SUMS = 'keep a sum and a count, each of dist_reduce_fx="sum", and divide them in compute()'


def _name_of(reduction: Any) -> str:
    return FunctionMembers(reduction).own_name or repr(reduction)


def _state_of(metric: Any, name: str) -> str:
    return f"state {name!r} of {type(metric).__name__}"


def _adds_up(reduction: Any, value: Any) -> bool:
    is_number = isinstance(value, Tensor) and value.dtype != torch.bool and not value.is_complex()
    return is_number and _name_of(reduction) == "dim_zero_sum"


def _merge(metric: Any, name: str, values: list[Any]) -> Any:
    reduction = metric._reductions[name]
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    if len(values) == 1:
        return values[0]
    stacked = torch.stack(values)
    # A mean of equal values is exact: a constant such as the data range of PSNR.
    if _name_of(reduction) == "dim_zero_mean" and not torch.equal(stacked, stacked[:1].expand_as(stacked)):
        raise ValueError(
            f'{_state_of(metric, name)} has dist_reduce_fx="mean", but processes, which may have different numbers '
            f"of samples, have different values: {[each.tolist() for each in values]}; {_USE_SUMS}"
        )
    return stacked if reduction is None else reduction(stacked)  # with None, compute() expects (ranks, ...)


def _never() -> bool:
    return False


def _scalars(name: str, value: Any) -> Sums:
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: value.reshape(())}
    if isinstance(value, Tensor) and value.ndim == 1:
        return {f"{name}/class_{index:02d}": each for index, each in enumerate(value.unbind())}
    if isinstance(value, int | float):
        return {name: value}
    what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
    raise ValueError(f"metric {name!r} returned {what}; only a number, a vector or a dict of these can be logged")


def _detached(inputs: Sequence[Any], named: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Detach tensors: a list state would keep every batch's graph."""
    plain = [each.detach() if isinstance(each, Tensor) else each for each in inputs]
    return plain, {name: each.detach() if isinstance(each, Tensor) else each for name, each in named.items()}
