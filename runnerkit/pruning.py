"""Which weights of a model go: masks by the methods of ``torch.nn.utils.prune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PruningFn = str | Callable[..., Any]


def pruning_function(name: PruningFn) -> Callable[..., Any]:
    """Find a function of ``torch.nn.utils.prune`` by name; one that is given is returned.

    Raises:
        ValueError: there is none of that name for one module.

    >>> pruning_function("l1_unstructured").__name__
    'l1_unstructured'
    """
    known = ("l1_unstructured", "random_unstructured", "ln_structured", "random_structured")
    if name not in known and not callable(name):
        raise ValueError(
            f"pruning_fn={name!r} is none of {', '.join(known)}; or pass a function (module, name, amount)"
        )
    from torch.nn.utils import prune  # `import torch` does without it

    function: Callable[..., Any] = getattr(prune, name) if isinstance(name, str) else name
    return function


def prunable(
    model: nn.Module, *, keys: Sequence[str] = ("weight",), layers: Sequence[str] | None = None
) -> dict[str, nn.Parameter]:
    """Find what is pruned, by name.

    Args:
        keys: names of parameters within their modules.
        layers: names of modules; None is all whose parameter has two dimensions or more, so no bias and no norm.
    Raises:
        ValueError: there is nothing, or a layer without.
    """
    found: dict[str, nn.Parameter] = {}
    modules = dict(model.named_modules())
    for layer in layers if layers is not None else modules:
        if layer not in modules:
            raise ValueError(
                f"layers_to_prune has {layer!r}; the model's layers are {[each for each in modules if each]}"
            )
        own = {key: each for key, each in modules[layer].named_parameters(recurse=False) if key in keys}
        if layers is not None and not own:
            raise ValueError(f"layer {layer!r} has none of the parameters {list(keys)} to prune")
        wanted = own if layers is not None else {key: each for key, each in own.items() if each.ndim > 1}
        found |= {f"{layer}.{key}".lstrip("."): each for key, each in wanted.items()}
    if not found:
        raise ValueError(f"the model has no parameter of two dimensions among {list(keys)} to prune")
    return found


def new_mask(
    parameter: Tensor, mask: Tensor | None, pruning_fn: PruningFn, *, amount: float, **arguments: Any
) -> Tensor:
    """Prune `amount` of what `mask` has left of a parameter; return the mask, True where a weight stays.

    Args:
        amount: a share in [0, 1], or an int: a number.
        arguments: others of `pruning_fn`, such as ``n`` and ``dim`` of ln_structured.
    """
    from torch.nn.utils import prune

    holder = nn.Module()
    holder.weight = nn.Parameter(parameter.detach().clone())
    if mask is not None:
        prune.custom_from_mask(holder, "weight", mask)
    pruning_function(pruning_fn)(holder, "weight", amount, **arguments)
    return holder.weight_mask.bool()  # type: ignore[operator]  # a tensor, of which torch says that it may be a module


def sparsity(masks: Mapping[str, Tensor]) -> float:
    """Compute the share of weights under masks that are pruned.

    >>> sparsity({"a": torch.tensor([True, False]), "b": torch.tensor([True, True])})
    0.25
    """
    num_weights = sum(each.numel() for each in masks.values())
    return 1 - sum(int(each.sum()) for each in masks.values()) / num_weights


def prune_model(
    model: nn.Module,
    pruning_fn: PruningFn = "l1_unstructured",
    keys_to_prune: Sequence[str] = ("weight",),
    amount: float = 0.5,
    layers_to_prune: Sequence[str] | None = None,
    **arguments: Any,
) -> dict[str, Tensor]:
    """Set weights of a model to zero, for good; return the masks by parameter, True where a weight stayed.

    Args:
        pruning_fn: of ``torch.nn.utils.prune``, by name, or one's own (module, name, amount).
        keys_to_prune, layers_to_prune: parameters and modules; by default each weight of two dimensions or more.
        amount: a share of each parameter, or an int: a number.
        arguments: others of `pruning_fn`.

    >>> model = nn.Linear(4, 2)
    >>> masks = prune_model(model, amount=0.25)
    >>> int((model.weight == 0).sum())
    2
    """
    masks = {}
    with torch.no_grad():
        for name, parameter in prunable(model, keys=keys_to_prune, layers=layers_to_prune).items():
            masks[name] = new_mask(parameter, None, pruning_fn, amount=amount, **arguments)
            parameter.mul_(masks[name])
    return masks
