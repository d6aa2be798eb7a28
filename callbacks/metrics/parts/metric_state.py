"""Reduction of a torchmetrics object's states over all processes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runnerkit.metrics.reduction import Share, on_cpu
from runnerkit.support.device_move import move
from runnerkit.types import StateDict

Part = list[StateDict]  # of one process: the states of each Metric within a metric, in order


class Metric(Protocol):
    """The interface of a torchmetrics ``Metric`` or ``MetricCollection``."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch."""

    def compute(self) -> Any:
        """Return the value over all batches since the last reset."""

    def reset(self) -> None:
        """Forget all batches."""


class LoaderMetric:
    """One pass of a metric over a loader, on a copy of the given metric.

    It does not use the metric's own synchronization, which enters one collective per element of a list state, so ranks
    with different numbers of batches hang, and which includes the empty state of a rank without batches. Neither does
    it use ``merge_state``, which raises for every metric whose ``full_state_update`` is not False.
    """

    def __init__(self, metric: Metric, device: torch.device) -> None:
        self.metric: Any = copy.deepcopy(metric)
        self.metric.reset()
        if isinstance(self.metric, nn.Module):
            self.metric.to(device)
        self._inner = _inner_metrics(self.metric)
        for each in self._inner:
            each.distributed_available_fn = _never  # torchmetrics must not reduce the states again
        self._device = device
        self._is_empty = True
        self._inherited: list[Part] = []  # of other ranks, if a run resumes on fewer processes

    def update(self, args: Sequence[Any], kwargs: dict[str, Any], *, want_value: bool) -> Any:
        """Add a batch; return the batch's own value if `want_value`."""
        self._is_empty = False
        if want_value:
            return self.metric(*args, **kwargs)
        return self.metric.update(*args, **kwargs)

    def share(self) -> Share | None:
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
        return Share(sums, others if any(others[0]) else [])

    def compute(self, total: Share) -> Any:
        """Return the value over all processes, from the shares of all.

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
        return self.metric.compute()

    def state_dict(self) -> StateDict:
        """Copy the states to the CPU.

        Raises:
            TypeError: the metric does not declare states.
        """
        check_states(self.metric, wanted_to="be saved within an epoch")
        return {"parts": on_cpu(self._parts())}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        """Continue from results of :meth:`state_dict`."""
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
            setattr(metric, name, move(state, self._device, path=name))
        metric._update_count = max(metric._update_count, 1)  # or compute() warns on a rank without batches


def check_states(metric: Metric, *, wanted_to: str) -> None:
    """Raise if the states of a metric are unknown.

    Raises:
        TypeError: the object is not a torchmetrics metric.
    """
    if not _inner_metrics(metric):
        raise TypeError(
            f"{type(metric).__name__} is not a torchmetrics Metric, so its state cannot {wanted_to}; "
            "derive it from torchmetrics.Metric and use add_state"
        )


def check_reductions(metric: Metric) -> None:
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
    return getattr(reduction, "__name__", repr(reduction))


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
