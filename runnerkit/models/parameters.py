"""Parameters of modules: frozen, averaged, and out of their wrappers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

_MOST_NAMES = 5


def check_shapes(model: nn.Module, reader: str) -> None:
    """Raise unless the shapes of all parameters and buffers are known, also those of lazy modules.

    Args:
        reader: what needs the shapes.
    Raises:
        ValueError: with their names and what to write.

    >>> check_shapes(nn.LazyLinear(1), "EMACallback")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ValueError: EMACallback needs the shapes of all parameters, but those of lazy modules ... 'weight', 'bias': ...
    """
    tensors = [*model.named_parameters(), *model.named_buffers()]
    names = [repr(name) for name, each in tensors if is_lazy(each)]
    if names:
        named = ", ".join([*names[:_MOST_NAMES], "..."] if len(names) > _MOST_NAMES else names)
        raise ValueError(
            f"{reader} needs the shapes of all parameters, but those of lazy modules have none before their first "
            f"batch, {named}: run one through the model in get_model, or before you pass it to train(), such as "
            "model(torch.zeros(2, NUM_FEATURES))"
        )


def set_requires_grad(model: nn.Module, requires_grad: bool | Mapping[str, bool]) -> None:
    """Set ``requires_grad`` of all parameters.

    Args:
        model: a module.
        requires_grad: one value for all, or {name of a parameter: value} for each.
    Raises:
        KeyError: a parameter is not in the mapping.

    >>> model = nn.Linear(2, 1)
    >>> set_requires_grad(model, {"weight": False, "bias": True})
    >>> model.weight.requires_grad
    False
    """
    for name, parameter in model.named_parameters():
        if isinstance(requires_grad, Mapping) and name not in requires_grad:
            raise KeyError(f"requires_grad lacks parameter {name!r}; it has {sorted(requires_grad)}")
        parameter.requires_grad_(bool(requires_grad[name] if isinstance(requires_grad, Mapping) else requires_grad))


@torch.no_grad()
def soft_update(target: nn.Module, source: nn.Module, tau: float) -> None:
    """Change the parameters of `target` in place to (1 - tau) * target + tau * source.

    Under FSDP2 every rank must call this.

    Args:
        target, source: modules with the same parameters in the same order.
        tau: in [0, 1].
    Raises:
        ValueError: `tau` is outside [0, 1], or the numbers of parameters differ.

    >>> target, source = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    >>> _ = nn.init.zeros_(target.weight), nn.init.ones_(source.weight)
    >>> soft_update(target, source, tau=0.25)
    >>> target.weight.item()
    0.25
    """
    if not 0 <= tau <= 1:
        raise ValueError(f"tau must be in [0, 1], got {tau}")
    if "torch.distributed.fsdp" in sys.modules:  # parameters that a forward pass gathered are copies of its shards
        parts: list[Any] = [*target.modules(), *source.modules()]
        for part in parts:
            if isinstance(part, sys.modules["torch.distributed.fsdp"].FSDPModule):
                part.reshard()
    for mine, theirs in zip(target.parameters(), source.parameters(), strict=True):
        mine.lerp_(_placed_like(theirs, mine), tau)


def _placed_like(value: Tensor, like: Tensor) -> Tensor:
    """Return `value` on the device of `like`, and sharded as it is: under FSDP2 only trained models are sharded."""
    if type(value.data) is not type(like.data):
        from runnerkit.models.shards import shard_like, whole  # late: half a second

        value = shard_like(whole(value), like)
    return value.to(like)


def get_nn_from_ddp_module(model: nn.Module) -> nn.Module:
    """Return the module within ``DistributedDataParallel`` or ``DataParallel``, or `model` itself.

    >>> get_nn_from_ddp_module(torch.nn.DataParallel(nn.Linear(2, 1)))
    Linear(in_features=2, out_features=1, bias=True)
    """
    while isinstance(model, DataParallel | DistributedDataParallel):
        model = model.module
    return model


def is_trained(model: nn.Module) -> bool:
    """Return whether any parameter requires gradients; a frozen teacher has none.

    >>> is_trained(nn.Linear(1, 1)), is_trained(nn.ReLU())
    (True, False)
    """
    return any(parameter.requires_grad for parameter in model.parameters())


def names_of_parameters(parameters: Mapping[str, Iterable[tuple[str, nn.Parameter]]]) -> dict[int, str]:
    """Return the name of each parameter by its id: the model's key, if it has one, and the name within the model.

    Args:
        parameters: those of each model by key, with their names; of several names of one, the first counts.

    >>> models = {"": nn.Linear(1, 1), "D": nn.Linear(1, 1, bias=False)}
    >>> list(names_of_parameters({key: each.named_parameters() for key, each in models.items()}).values())
    ['weight', 'bias', 'D.weight']
    """
    names: dict[int, str] = {}
    for key, named in parameters.items():
        for name, parameter in named:
            names.setdefault(id(parameter), f"{key}.{name}".lstrip("."))
    return names
