"""Copies of numbers from a device to the host: all at once, without rounding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from runnerkit.types import Metrics, Scalar, widest_float


def read_metrics_at_once(metrics: Iterable[Mapping[str, Scalar]]) -> list[Metrics]:
    """Convert () tensors and numbers to Python floats; synchronizes once with each device that holds tensors.

    Values are copied as float64 if the device has it: float32, float64 and integers up to 2^53 are exact.

    >>> read_metrics_at_once([{"loss": torch.tensor(0.5), "lr": 1}, {"count": torch.tensor(2**24 + 1)}])
    [{'loss': 0.5, 'lr': 1.0}, {'count': 16777217.0}]
    """
    metrics = list(metrics)
    tensors = [value for each in metrics for value in each.values() if isinstance(value, Tensor)]
    on_host = iter(_read(tensors))
    return [
        {key: next(on_host) if isinstance(value, Tensor) else float(value) for key, value in each.items()}
        for each in metrics
    ]


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
