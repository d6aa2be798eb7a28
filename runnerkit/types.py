"""The shapes that values take on their way through a runner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

T = TypeVar("T")

# One component, or several by name (a GAN has two models and two optimizers). Any, for dict is invariant: to a type
# checker a dict[str, Linear] is no dict[str, Module].
OneOrMany: TypeAlias = T | dict[str, Any]

Batch: TypeAlias = Any  # whatever the user's loader yields
Scalar: TypeAlias = Tensor | float  # a () tensor, or a Python number
Metrics: TypeAlias = dict[str, float]
Loaders: TypeAlias = Mapping[str, Iterable[Any]]
Model: TypeAlias = OneOrMany[nn.Module]
Criterion: TypeAlias = OneOrMany[Callable[..., Tensor]]
Optimizers: TypeAlias = OneOrMany[Optimizer]
Scheduler: TypeAlias = OneOrMany[Any]  # anything with step(), state_dict(), load_state_dict()
StateDict: TypeAlias = dict[str, Any]


def as_dict(component: OneOrMany[T] | None) -> dict[str, T]:
    """View one component, several, or none as a dict; a lone one has the key ``""``.

    >>> as_dict(3), as_dict({"a": 1}), as_dict(None)
    ({'': 3}, {'a': 1}, {})
    """
    if component is None:
        return {}
    return component if isinstance(component, dict) else {"": component}


def like(template: OneOrMany[Any] | None, values: dict[str, T]) -> Any:
    """Give `values` (from :func:`as_dict`) the form that `template` has.

    >>> like(object(), {"": 3}), like({"a": object()}, {"a": 1}), like(None, {})
    (3, {'a': 1}, None)
    """
    if template is None:
        return None
    return values if isinstance(template, dict) else values[""]


def each_tensor(value: Any, function: Callable[[Tensor], Any], *, others: Any = ...) -> Any:
    """Apply `function` to each tensor in nested tuples, lists and dicts; `others` replaces what else is there.

    >>> each_tensor([torch.ones(2), "a"], len), each_tensor({"x": torch.ones(2), "y": 7}, len, others=None)
    ([2, 'a'], {'x': 2, 'y': None})
    """
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(each_tensor(each, function, others=others) for each in value)
    if isinstance(value, dict):
        return {key: each_tensor(each, function, others=others) for key, each in value.items()}
    return value if others is ... else others


def widest_float(device: torch.device) -> torch.dtype:
    """Type of sums on `device`: float64, but where there is none.

    >>> widest_float(torch.device("cpu")), widest_float(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64
