"""Weight pruning with masks from the methods of ``torch.nn.utils.prune``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

PruningFn = str | Callable[..., Any]


def pruning_function(name: PruningFn) -> Callable[..., Any]:
    """Look up a function of ``torch.nn.utils.prune`` by name; a callable is returned unchanged.

    Raises:
        ValueError: the name is unknown or prunes several modules.

    >>> pruning_function("l1_unstructured").__name__
    'l1_unstructured'
    """
    from torch.nn.utils import prune  # `import torch` does not import it

    functions = (prune.l1_unstructured, prune.random_unstructured, prune.ln_structured, prune.random_structured)
    known: dict[str, Callable[..., Any]] = {each.__name__: each for each in functions}
    if not callable(name) and not (isinstance(name, str) and name in known):
        raise ValueError(
            f"pruning_fn must be one of {', '.join(known)} or a function (module, name, amount), got {name!r}"
        )
    return known[name] if isinstance(name, str) else name


def prunable(
    model: nn.Module, *, keys: Sequence[str] = ("weight",), layers: Sequence[str] | None = None
) -> dict[str, nn.Parameter]:
    """Return the parameters to prune, by name.

    Args:
        keys: names of parameters within their modules.
        layers: names of modules; None selects parameters with two or more dimensions, which excludes biases and norms.
    Raises:
        ValueError: there are no parameters to prune, or none in one of `layers`, or a layer is unknown.
    """
    found: dict[str, nn.Parameter] = {}
    modules = dict(model.named_modules())
    for layer in layers if layers is not None else modules:
        if layer not in modules:
            raise ValueError(
                f"layers_to_prune names {layer!r}; the model's layers are {[each for each in modules if each]}"
            )
        own = {key: each for key, each in modules[layer].named_parameters(recurse=False) if key in keys}
        if layers is not None and not own:
            raise ValueError(f"layer {layer!r} does not have any of the parameters {list(keys)} to prune")
        wanted = own if layers is not None else {key: each for key, each in own.items() if each.ndim > 1}
        found |= {f"{layer}.{key}".lstrip("."): each for key, each in wanted.items()}
    if not found:
        raise ValueError(f"the model does not have parameters {list(keys)} with two or more dimensions to prune")
    return found


def new_mask(
    parameter: Tensor, mask: Tensor | None, pruning_fn: PruningFn, *, amount: float, **arguments: Any
) -> Tensor:
    """Prune `amount` of the weights that `mask` keeps; return the new mask, True for weights that are kept.

    Args:
        amount: a fraction in [0, 1], or a number of weights (int).
        arguments: other arguments of `pruning_fn`, such as ``n`` and ``dim`` of ln_structured.
    """
    from torch.nn.utils import prune

    holder = nn.Module()
    holder.weight = nn.Parameter(parameter.detach().clone())
    if mask is not None:
        prune.custom_from_mask(holder, "weight", mask)
    pruning_function(pruning_fn)(holder, "weight", amount, **arguments)
    return holder.weight_mask.bool()  # type: ignore[operator]  # torch types it as tensor or module


def sparsity(masks: Mapping[str, Tensor]) -> float:
    """Compute the fraction of masked weights that are pruned.

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
    """Permanently set weights of a model to zero; return the masks by parameter, True for weights that are kept.

    Args:
        pruning_fn: name of a function of ``torch.nn.utils.prune``, or a function (module, name, amount).
        keys_to_prune, layers_to_prune: names of parameters and modules; by default all weights with two or more
            dimensions.
        amount: a fraction of each parameter, or a number of weights (int).
        arguments: other arguments of `pruning_fn`.

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
