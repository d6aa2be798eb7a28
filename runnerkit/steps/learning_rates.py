"""The learning rates of all parameter groups, as they are logged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runnerkit.types import as_dict, groups_of


def name_of_rate(key: str) -> str:
    """Return the name under which the rate of the optimizer `key` is logged; "" is the only optimizer."""
    return f"lr_{key}" if key else "lr"


def rates_of(optimizer: Any, *, key: str = "", factor: float = 1.0) -> dict[str, float]:
    """Return {"lr": of the first group, "lr/1": of the second, ...} of an optimizer; `key` is appended to "lr".

    Args:
        factor: what multiplies the rates of the groups in a step.

    >>> import torch
    >>> first, second = ({"params": [torch.zeros(1)], "lr": lr} for lr in (0.1, 0.2))
    >>> rates_of(torch.optim.SGD([first, second]), key="D")
    {'lr_D': 0.1, 'lr_D/1': 0.2}
    """
    name = name_of_rate(key)
    rates = [float(group["lr"]) * factor for group in groups_of(optimizer)]
    return {f"{name}/{number}" if number else name: rate for number, rate in enumerate(rates)}


def rates_of_all(optimizers: Any, factors: Mapping[str, float]) -> dict[str, float]:
    """Return the rates of one optimizer, of several by key, or of none, times the `factors` of their keys."""
    groups: Any = getattr(optimizers, "param_groups", ())
    if len(groups) == 1:
        return {"lr": float(groups[0]["lr"]) * factors.get("", 1.0)}  # the most common; each step log calls this
    found: dict[str, float] = {}
    for key, each in as_dict(optimizers).items():
        found |= rates_of(each, key=key, factor=factors.get(key, 1.0))
    return found
