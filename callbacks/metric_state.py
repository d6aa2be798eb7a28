"""A torchmetrics object over one loader, on all processes: its states are reduced, not its values."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runnerkit.engine import IEngine, move
from runnerkit.types import StateDict

Part = list[StateDict]  # what one process saw: the states of each Metric within a metric, in order


class Metric(Protocol):
    """What a torchmetrics ``Metric`` or ``MetricCollection`` looks like from here."""

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Add a batch."""

    def compute(self) -> Any:
        """Give the value of all batches since the last reset."""

    def reset(self) -> None:
        """Forget all batches."""


class LoaderMetric:
    """One pass of a metric over a loader; the metric that was given is copied and stays as it is.

    Why not the metric's own synchronisation: it enters one collective per element of a list state, so that ranks with
    different numbers of batches hang, and it counts the empty state of a rank that saw nothing. Nor ``merge_state``,
    which refuses every metric whose ``full_state_update`` is not False.
    """

    def __init__(self, metric: Metric, device: torch.device) -> None:
        self.metric: Any = copy.deepcopy(metric)
        self.metric.reset()
        if isinstance(self.metric, nn.Module):
            self.metric.to(device)
        for each in _inner_metrics(self.metric):
            each.distributed_available_fn = _never  # torchmetrics must not reduce once more
        self._device = device
        self._is_empty = True
        self._inherited: list[Part] = []  # of other ranks, when a run resumes on fewer processes

    def update(self, args: Sequence[Any], kwargs: dict[str, Any], *, want_value: bool) -> Any:
        """Add a batch; return its own value if wanted, which leaves the accumulated state alone."""
        self._is_empty = False
        if want_value:
            return self.metric(*args, **kwargs)
        return self.metric.update(*args, **kwargs)

    def compute(self, engine: IEngine) -> Any:
        """Give the value over all processes, None if none saw a batch; every rank must call: this reduces.

        Raises:
            TypeError: the metric has no states to reduce.
        """
        if engine.num_processes > 1 or self._inherited:
            parts = [part for parts in engine.gather_object(self.parts()) for part in parts]
            if not parts:
                return None
            self._put(_merge(_inner_metrics(self.metric), parts))
        elif self._is_empty:
            return None
        with warnings.catch_warnings():
            # That this rank had no update is no mistake: another one had.
            warnings.filterwarnings("ignore", message="The ``compute`` method of metric", category=UserWarning)
            return self.metric.compute()

    def parts(self) -> list[Part]:
        """Copy the states to the CPU: none for a rank that saw no batch, several after a resume on fewer ranks."""
        own = [] if self._is_empty else [[_on_cpu(each.metric_state) for each in self._stateful()]]
        return [*own, *self._inherited]

    def load(self, parts: list[Part]) -> None:
        """Go on from states of :meth:`parts`."""
        if parts:
            self._put(parts[0])
            self._is_empty = False
            self._inherited = parts[1:]

    def _put(self, part: Part) -> None:
        for each, states in zip(_inner_metrics(self.metric), part, strict=True):
            for name, state in states.items():
                setattr(each, name, move(state, self._device, path=name))

    def _stateful(self) -> list[Any]:
        metrics = _inner_metrics(self.metric)
        if not metrics:
            raise TypeError(
                f"{type(self.metric).__name__} is no torchmetrics Metric, so its state can be neither reduced over "
                "processes nor saved within an epoch; derive it from torchmetrics.Metric and use add_state"
            )
        return metrics


def _inner_metrics(metric: Any) -> list[Any]:
    modules = metric.modules() if isinstance(metric, nn.Module) else ()
    return [module for module in modules if hasattr(module, "_reductions")]


def _merge(metrics: list[Any], parts: list[Part]) -> Part:
    return [
        {name: _reduce([states[name] for states in of_ranks], each._reductions[name]) for name in of_ranks[0]}
        for each, of_ranks in zip(metrics, zip(*parts, strict=True), strict=True)
    ]


def _reduce(values: list[Any], reduction: Any) -> Any:
    # `_reductions` is the one private name used; nothing public tells sum from max.
    if isinstance(values[0], list):
        return [item for value in values for item in value]
    stacked = torch.stack(values)
    return stacked if reduction is None else reduction(stacked)  # None: compute() itself expects (ranks, ...)


def _on_cpu(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state


def _never() -> bool:
    return False
