"""Means over a loader that are exact on any number of processes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from runnerkit.metrics.first_non_finite import FirstNonFinite
from runnerkit.metrics.reduction import PartialSums
from runnerkit.support.host_copy import as_number, complex_metric, is_complex
from runnerkit.types import Metrics, Scalar, StateDict, widest_float

__all__ = ["AdditiveMetric", "LoaderMeans"]


class AdditiveMetric:
    """The running mean of the values of batches, weighted by their numbers of samples.

    Args:
        compute_on_call, mode: are ignored; scripts written for Catalyst pass them.

    >>> metric = AdditiveMetric()
    >>> values = metric.update(1.0, num_samples=3), metric.update(2.0, num_samples=1)
    >>> metric.compute()[0]
    1.25
    """

    def __init__(self, compute_on_call: bool = True, mode: str = "numpy") -> None:
        self.compute_on_call, self.mode = compute_on_call, mode
        self.reset()

    def reset(self) -> None:
        """Discard all values."""
        self.mean, self.num_samples, self._m2 = 0.0, 0, 0.0

    def update(self, value: Scalar, num_samples: int) -> Scalar:
        """Add `value`, the mean of `num_samples` samples (Chan, Golub & LeVeque 1979); return it.

        Raises:
            ValueError: `num_samples` is negative.
        """
        if num_samples < 0:
            raise ValueError(f"num_samples must be >= 0, got {num_samples}")
        if num_samples:
            self.num_samples += num_samples
            number = float(value.detach() if isinstance(value, Tensor) else value)
            delta = number - self.mean
            self.mean += delta * num_samples / self.num_samples
            self._m2 += delta * (number - self.mean) * num_samples
        return value

    @property
    def std(self) -> float:
        """The standard deviation, with num_samples - 1 in the denominator; 0 below two samples."""
        return float((self._m2 / (self.num_samples - 1)) ** 0.5) if self.num_samples > 1 else 0.0

    def compute(self) -> tuple[float, float]:
        """Return mean and standard deviation."""
        return self.mean, self.std

    def compute_key_value(self) -> Metrics:
        """Return mean and standard deviation by name."""
        return {"mean": self.mean, "std": self.std}

    def merge(self, *others: AdditiveMetric) -> None:
        """Add the values of other metrics, for example of other processes."""
        for each in others:
            if each.num_samples:
                self.update(each.mean, each.num_samples)
                self._m2 += each._m2  # update() took the other's values as equal to their mean


def means_of(total: PartialSums | None) -> Metrics:
    """Compute the means from the :meth:`LoaderMeans.share` of one process, or from the total of all."""
    sums = {key: each.tolist() for key, each in total.sums.items()} if total is not None else {}
    return {key: value / count if count else math.nan for key, (value, count) in sums.items()}


class LoaderMeans:
    """The mean of every metric of a loader: sum(value * weight) / sum(weight), by default weighted by batch size.

    Sums stay on the device, in float64 if it supports that; :meth:`totals` copies them to the host once.

    Args:
        first_non_finite: receives the values of every batch, if given.
        left_out: names of metrics that are not averaged.
    """

    def __init__(self, first_non_finite: FirstNonFinite | None = None, left_out: frozenset[str] = frozenset()) -> None:
        # Batches that log the same keys share one vector, so that a step costs one stack and one add.
        self._sums: dict[tuple[str, ...], tuple[Tensor, Any]] = {}
        self._host_sums: dict[str, tuple[Any, Any]] = {}
        self.num_samples = 0
        self.first_non_finite = first_non_finite
        self.left_out = left_out

    def update(
        self, metrics: dict[str, Scalar], batch_size: int, *, weight: Scalar | None = None, batch_step: int = 0
    ) -> None:
        """Add the values of one batch: () tensors or Python numbers.

        Args:
            weight: of the batch, a number or a () tensor; None is `batch_size`.
            batch_step: number of the batch, for `first_non_finite`.
        Raises:
            TypeError, ValueError: a value is neither; the message names it.
        """
        self.num_samples += batch_size
        tensors: dict[str, Tensor] = {}
        first, is_alike = None, True
        for key, value in metrics.items():
            if key in self.left_out:
                continue
            if not isinstance(value, Tensor):
                self._add_number(key, _number(key, value), batch_size if weight is None else weight, batch_step)
                continue
            if value.requires_grad:
                value = value.detach()
            tensors[key] = value = value if value.ndim == 0 else _scalar(key, value)
            if first is None:
                first = value
            elif value.device != first.device or (
                value.dtype != first.dtype and not (value.dtype.is_floating_point and first.dtype.is_floating_point)
            ):
                is_alike = False
        if first is None:
            return
        keys = tuple(tensors)
        values = first if len(keys) == 1 else torch.stack(_alike(tensors) if not is_alike else [*tensors.values()])
        known = self._sums.get(keys)
        if known is None:
            _check_real(tensors)  # not in each step: a sum of real numbers refuses a complex one anyway
            known = torch.zeros(len(keys), dtype=widest_float(values.device), device=values.device), 0
        if weight is None or not isinstance(weight, Tensor):
            number = batch_size if weight is None else float(weight)
            self._sums[keys] = known[0].add_(values, alpha=number), known[1] + number
        else:
            own = (weight.detach() if weight.requires_grad else weight).to(known[0])
            self._sums[keys] = known[0].addcmul_(values, own), known[1] + own
        if self.first_non_finite is not None:
            self.first_non_finite.add(keys, values.reshape(-1), batch_step)

    def _add_number(self, key: str, number: float, weight: Scalar, batch_step: int) -> None:
        known, count = self._host_sums.get(key, (0.0, 0))
        if isinstance(weight, Tensor):
            weight = weight.detach().to(widest_float(weight.device))
        self._host_sums[key] = known + number * weight, count + weight
        if self.first_non_finite is not None:
            self.first_non_finite.add_number(key, number, batch_step)

    @property
    def weight(self) -> Any:
        """The sum of the weights of the batches with a metric: a number, or a () tensor on the device.

        If a metric is a tensor in any batch, only batches with such a metric count.
        """
        counts = [count for _, count in self._sums.values()]  # each batch is in one of them, that of its metrics
        return sum(counts) if counts else next((count for _, count in self._host_sums.values()), 0)

    def totals(self) -> dict[str, tuple[float, float]]:
        """Return {metric: (sum, sum of weights)} of this process, with one copy to the host."""
        totals = {key: (_plain(total), _plain(count)) for key, (total, count) in self._host_sums.items()}
        for keys, (sums, count) in self._sums.items():
            number = _plain(count)
            for key, total in zip(keys, sums.tolist(), strict=True):
                known, known_count = totals.get(key, (0.0, 0))
                totals[key] = known + total, known_count + number
        return totals

    def share(self) -> PartialSums | None:
        """Return {metric: [sum, count]}; None if there was no batch."""
        if not self.num_samples:
            return None
        return PartialSums({key: torch.tensor(each, dtype=torch.float64) for key, each in self.totals().items()})

    def state_dict(self) -> StateDict:
        """Return the state for a checkpoint in the middle of an epoch."""
        sums = [(list(keys), total.cpu(), _plain(count)) for keys, (total, count) in self._sums.items()]
        host_sums = {key: (_plain(total), _plain(count)) for key, (total, count) in self._host_sums.items()}
        first = {} if self.first_non_finite is None else {"first_non_finite": self.first_non_finite.state_dict()}
        return {"sums": sums, "host_sums": host_sums, "num_samples": self.num_samples, **first}

    def load_state_dicts(self, states: Sequence[StateDict], *, device: torch.device) -> None:
        """Load the :meth:`state_dict` of one process, bit for bit, or the sum of several."""
        self.num_samples = sum(state["num_samples"] for state in states)
        self._sums, self._host_sums = {}, {}
        for state in states:
            if self.first_non_finite is not None and "first_non_finite" in state:
                self.first_non_finite.load_state_dict(state["first_non_finite"], device=device)
            for keys, total, count in state["sums"]:
                self._sums[tuple(keys)] = _plus(self._sums.get(tuple(keys)), (total.to(device), count))
            for key, own in state["host_sums"].items():
                self._host_sums[key] = _plus(self._host_sums.get(key), own)


def _plus(known: tuple[Any, Any] | None, own: tuple[Any, Any]) -> tuple[Any, Any]:
    return own if known is None else (known[0] + own[0], known[1] + own[1])


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _scalar(key: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise ValueError(f"batch_metrics[{key!r}] must be a scalar, got shape {tuple(value.shape)}; take its mean()")
    return value.reshape(())


def _check_real(tensors: dict[str, Tensor]) -> None:
    for key, value in tensors.items():
        if is_complex(value):
            raise complex_metric(key)


def _alike(tensors: dict[str, Tensor]) -> list[Tensor]:
    """Move tensors to one device, an accelerator if any of them is on one, in the dtype of the sums."""
    _check_real(tensors)
    device = next((value.device for value in tensors.values() if value.device.type != "cpu"), torch.device("cpu"))
    return [value.to(device, widest_float(device)) for value in tensors.values()]


def _number(key: str, value: Any) -> float:
    try:
        return as_number(key, value)
    except (TypeError, ValueError):
        if is_complex(value):
            raise
        raise TypeError(f"batch_metrics[{key!r}] must be a () tensor or a number, got {type(value).__name__}") from None
