"""Metrics computed from sums over samples, which are reduced over batches and processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.batch_keys import pick
from runnerkit.callbacks.metrics.parts.loader_state import LoaderStateCallback
from runnerkit.metrics.reduction import Share
from runnerkit.support.arguments import check_keys, check_strings
from runnerkit.support.host_copy import read_metrics_at_once
from runnerkit.types import Metrics, StateDict, widest_float

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

Sums = dict[str, Any]  # tensors, or ints known to the host


class LoaderSums:
    """Sums over the batches of one loader, on the device."""

    def __init__(self) -> None:
        self._sums: Sums = {}

    def add(self, sums: Sums) -> None:
        """Add the sums of a batch."""
        if not self._sums:
            self._sums = {**sums}
            return
        for name, each in sums.items():
            self._sums[name] = self._sums[name] + each  # not in place: the first tensor belongs to a batch

    def share(self) -> Share | None:
        return Share({name: torch.as_tensor(each) for name, each in self._sums.items()}) if self._sums else None

    def state_dict(self) -> StateDict:
        return {name: torch.as_tensor(each).cpu() for name, each in self._sums.items()}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        for state in states:
            if state:
                self.add({name: each.to(device) for name, each in state.items()})


class LoaderSumsCallback(LoaderStateCallback[LoaderSums]):
    """Base class of callbacks whose metrics are computed from sums, so exact over all samples of all processes.

    Args:
        keys: keys of ``runner.batch`` whose values are passed to :meth:`count`.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        prefix, suffix: added to the names, before a slash.
    """

    def __init__(self, *, log_on_batch: bool, prefix: str | None, suffix: str | None, **keys: Any) -> None:
        super().__init__()
        check_keys(self, **keys)
        check_strings(self, or_none=True, prefix=prefix, suffix=suffix)
        self.keys = tuple(keys.values())
        self.log_on_batch = log_on_batch
        self.prefix, self.suffix = prefix or "", suffix or ""

    @abstractmethod
    def count(self, *inputs: Tensor) -> Sums:
        """Return sums over one batch, on its device: integers, or floats of the widest type; no host sync."""

    @abstractmethod
    def values(self, sums: Sums) -> Sums:
        """Compute the metrics, () tensors by name, from the sums over a batch or over all samples; no host sync."""

    def check_total(self, sums: Sums, *, loader_key: str) -> None:
        """Raise for invalid totals of :meth:`count` over all processes, at the loader's end, where reading is free."""

    def new_state(self, runner: IRunner) -> LoaderSums:
        return LoaderSums()

    def on_batch_end(self, runner: IRunner) -> None:
        inputs, _ = pick(runner, *self.keys, reader=type(self).__name__)
        sums = self.count(*[each.detach() if each.requires_grad else each for each in inputs])
        self.state(runner).add(sums)
        if self.log_on_batch:
            values = self.values(sums)
            if self.prefix or self.suffix:
                values = named(values, prefix=self.prefix, suffix=self.suffix)
            runner.batch_metrics.update(values)

    def finish(self, runner: IRunner, state: LoaderSums, total: Share) -> None:
        self.check_total(total.sums, loader_key=runner.loader_key)
        runner.loader_metrics.update(as_floats(named(self.values(total.sums), prefix=self.prefix, suffix=self.suffix)))


def named(values: Sums, *, prefix: str, suffix: str) -> Sums:
    """Add prefix and suffix to the names.

    >>> list(named({"f1/_macro": torch.zeros(())}, prefix="my_", suffix="_a"))
    ['my_f1_a/_macro']
    """
    parts = {name: name.partition("/") for name in values}
    return {f"{prefix}{head}{suffix}{slash}{tail}": values[name] for name, (head, slash, tail) in parts.items()}


def as_floats(values: Sums) -> Metrics:
    """Convert () tensors to floats, with one copy to the host."""
    [metrics] = read_metrics_at_once([values])
    return metrics


def widest(value: Tensor) -> Tensor:
    """Convert to float64 if the device supports it: an integer times a float would be float32."""
    return value.to(widest_float(value.device))


def ratio(numerator: Tensor, denominator: Tensor, *, zero_division: float) -> Tensor:
    """Divide in float64 if the device supports it; x / 0 is `zero_division`."""
    numerator, denominator = widest(numerator), widest(denominator)
    safe = torch.where(denominator == 0, 1, denominator)
    return torch.where(denominator == 0, zero_division, numerator / safe)
