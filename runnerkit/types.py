"""Type aliases of components and batches, and functions for their nested structures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.support.device_move import is_container, rebuilt

T = TypeVar("T")

# One component, or several by name (a GAN has two models and two optimizers). Any, because dict is invariant: type
# checkers do not accept a dict[str, Linear] as a dict[str, Module].
OneOrMany: TypeAlias = T | dict[str, Any]

Batch: TypeAlias = Any  # any value that the loader yields
Scalar: TypeAlias = Tensor | float  # a () tensor, or a Python number
Metrics: TypeAlias = dict[str, float]
Model: TypeAlias = OneOrMany[nn.Module]
Criterion: TypeAlias = OneOrMany[Callable[..., Tensor]]
Optimizers: TypeAlias = OneOrMany[Optimizer]
Scheduler: TypeAlias = OneOrMany[Any]  # anything with step(), state_dict(), load_state_dict()
StateDict: TypeAlias = dict[str, Any]


def as_dict(component: OneOrMany[T] | None) -> dict[str, T]:
    """Return one component, several, or none as a dict; a single one has the key ``""``.

    >>> as_dict(3), as_dict({"a": 1}), as_dict(None)
    ({'': 3}, {'a': 1}, {})
    """
    if component is None:
        return {}
    return component if isinstance(component, dict) else {"": component}


def models_by_key(model: Model | None) -> dict[str, nn.Module]:
    """Return the models of a runner as :func:`as_dict` does, those in an ``nn.ModuleDict`` by its keys.

    >>> sorted(models_by_key(nn.ModuleDict({"a": nn.Identity(), "b": nn.Identity()})))
    ['a', 'b']
    """
    return dict(model.items()) if isinstance(model, nn.ModuleDict) else as_dict(model)


def like(template: OneOrMany[Any] | None, values: dict[str, T]) -> Any:
    """Convert `values` (from :func:`as_dict`) back to the form of `template`.

    >>> like(object(), {"": 3}), like({"a": object()}, {"a": 1}), like(None, {})
    (3, {'a': 1}, None)
    """
    if template is None:
        return None
    return values if isinstance(template, dict) else values[""]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the parameter groups of an optimizer; of one from outside torch that has none, an empty list.

    >>> [len(group["params"]) for group in groups_of(torch.optim.SGD([torch.zeros(1)], lr=0.1))], groups_of(None)
    ([1], [])
    """
    return getattr(optimizer, "param_groups", [])


def parameters_of(*optimizers: Any) -> Iterator[Any]:
    """Yield the parameters of all groups of optimizers.

    >>> len([*parameters_of(torch.optim.SGD([torch.zeros(1)], lr=0.1), None)])
    1
    """
    for each in optimizers:
        for group in groups_of(each):
            yield from group["params"]


def shared_parameters(optimizers: Iterable[Any]) -> dict[tuple[int, ...], list[Any]]:
    """Group the parameters that belong to several optimizers, by the positions of these.

    >>> a, b = torch.zeros(1), torch.zeros(2)
    >>> shared_parameters([torch.optim.SGD([a, b], lr=0.1), torch.optim.SGD([b], lr=0.1)])
    {(0, 1): [tensor([0., 0.])]}
    """
    holders: dict[Any, list[int]] = {}
    for position, optimizer in enumerate(optimizers):
        for each in dict.fromkeys(parameters_of(optimizer)):  # one may be in a group twice
            holders.setdefault(each, []).append(position)
    groups: dict[tuple[int, ...], list[Any]] = {}
    for each, positions in holders.items():
        if len(positions) > 1:
            groups.setdefault(tuple(positions), []).append(each)
    return groups


def each_tensor(value: Any, function: Callable[[Tensor], Any], *, others: Any = ...) -> Any:
    """Apply `function` to each tensor in nested containers, which keep their types; `others` replaces all other values.

    >>> each_tensor([torch.ones(2), "a"], len), each_tensor({"x": torch.ones(2), "y": 7}, len, others=None)
    ([2, 'a'], {'x': 2, 'y': None})
    """
    if isinstance(value, Tensor):
        return function(value)
    if is_container(value):
        return rebuilt(value, lambda each: each_tensor(each, function, others=others))
    return value if others is ... else others


def is_maker(component: Any) -> bool:
    """Return whether `component` is a function that makes an optimizer or a scheduler, not one of them.

    >>> is_maker(lambda parameters: None), is_maker(torch.optim.SGD([torch.zeros(1)], lr=0.1)), is_maker(None)
    (True, False, False)
    """
    return callable(component) and not has_step(component)


def has_step(component: Any) -> bool:
    """Return whether `component` has a method ``step``, as optimizers and schedulers of any class do.

    >>> has_step(torch.optim.SGD([torch.zeros(1)], lr=0.1)), has_step("adam")
    (True, False)
    """
    return hasattr(component, "step")


def widest_float(device: torch.device) -> torch.dtype:
    """Return the dtype for sums on `device`: float64 if supported, else float32.

    >>> widest_float(torch.device("cpu")), widest_float(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    if device.type == "mps" or (device.type == "xpu" and not torch.xpu.get_device_properties(device).has_fp64):
        return torch.float32
    return torch.float64
