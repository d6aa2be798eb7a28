"""Copies of numbers from a device to the host: all at once, without rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from runnerkit.types import Metrics, Scalar, widest_float


def read_metrics_at_once(metrics: Iterable[Mapping[str, Scalar]]) -> list[Metrics]:
    """Convert () tensors and numbers to Python floats; synchronizes once with each device that holds tensors.

    Values are copied as float64 if the device has it: float32, float64 and integers up to 2^53 are exact.

    Raises:
        TypeError: a tensor is complex.

    >>> read_metrics_at_once([{"loss": torch.tensor(0.5), "lr": 1}, {"count": torch.tensor(2**24 + 1)}])
    [{'loss': 0.5, 'lr': 1.0}, {'count': 16777217.0}]
    """
    metrics = list(metrics)
    tensors = [value for each in metrics for value in each.values() if isinstance(value, Tensor)]
    if [True for each in tensors if each.dtype.is_complex]:  # a function call for each would count in step logs
        raise complex_metric(next(key for each in metrics for key, value in each.items() if is_complex(value)))
    on_host = iter(_read(tensors))
    return [
        {key: next(on_host) if isinstance(value, Tensor) else float(value) for key, value in each.items()}
        for each in metrics
    ]


def as_number(key: str, value: Any) -> float:
    """Convert a () tensor or a number to a float.

    Raises:
        TypeError: it is complex.

    >>> as_number("z", 3)
    3.0
    """
    if not isinstance(value, float | int) and is_complex(value):
        raise complex_metric(key)
    return float(value)


def is_complex(value: Any) -> bool:
    """Return whether a tensor, an array or a number is complex; ``float(value)`` may discard its imaginary part."""
    if isinstance(value, Tensor):
        return value.is_complex()
    return isinstance(value, complex) or getattr(getattr(value, "dtype", None), "kind", "") == "c"


def complex_metric(key: str) -> TypeError:
    """Return the error for a complex metric, whose imaginary part would be lost."""
    return TypeError(
        f"metric {key!r} is complex, but only real numbers can be logged: log its abs(), or its real and imag as two "
        "metrics"
    )


def _read(tensors: list[Tensor]) -> list[float]:
    by_device: dict[torch.device, list[int]] = {}
    for index, each in enumerate(tensors):
        by_device.setdefault(each.device, []).append(index)
    values = [0.0] * len(tensors)
    for device, indices in by_device.items():  # values on the host are not copied
        stacked = torch.stack([tensors[index].detach().to(widest_float(device)).reshape(()) for index in indices])
        for index, value in zip(indices, stacked.tolist(), strict=True):
            values[index] = value
    return values
