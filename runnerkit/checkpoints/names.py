"""Names of weights, without what wrappers of modules add to them."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy as shallow_copy

from torch import nn

from runnerkit.support.torch_internals import COMPILED, METADATA, metadata_of
from runnerkit.types import StateDict

_WRAPPED = "module."  # prepended by DataParallel and DistributedDataParallel


def without_compiled(state: StateDict) -> StateDict:
    """Remove ``_orig_mod.`` from the names, wherever it occurs.

    >>> without_compiled({"0._orig_mod.weight": 1.0})
    {'0.weight': 1.0}
    """
    if not any(COMPILED in name.split(".") for name in state):
        return state
    bare = shallow_copy(state)  # with the module versions, an attribute of a model's state dict
    bare.clear()
    bare.update(zip(_without_compiled(state), state.values(), strict=True))
    if metadata := metadata_of(state):
        setattr(bare, METADATA, dict(zip(_without_compiled(metadata), metadata.values(), strict=True)))
    return bare


def under_names_of(module: nn.Module, state: StateDict) -> StateDict:
    """Rename weights to the names that `module` uses, with only its own wrapper prefixes."""
    names = list(module.state_dict())
    own = dict(zip(bare_names(names), names, strict=True))
    named = shallow_copy(state)
    named.clear()
    given = [name for name in state if name != "n_averaged" or name in own]  # AveragedModel's counter
    named.update((own.get(bare, bare), state[name]) for bare, name in zip(bare_names(given), given, strict=True))
    return named


def with_tied(module: nn.Module, state: StateDict) -> StateDict:
    """Complete `state`, under the names of `module`, if it holds a tied parameter under only one of its names.

    >>> layers = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    >>> layers[1].weight = layers[0].weight
    >>> sorted(with_tied(layers, {"0.weight": 1.0}))
    ['0.weight', '1.weight']
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    missing = parameters.keys() - state.keys()
    if not missing:
        return state
    held = {id(each): name for name, each in parameters.items() if name in state}
    whole = shallow_copy(state)
    whole.update((name, state[held[id(parameters[name])]]) for name in missing if id(parameters[name]) in held)
    return whole


def bare_names(names: list[str]) -> list[str]:
    """Remove the prefixes of wrappers."""
    bare = _without_compiled(names)
    while bare and all(name.startswith(_WRAPPED) for name in bare):
        bare = _without_compiled(name.removeprefix(_WRAPPED) for name in bare)
    return bare


def _without_compiled(names: Iterable[str]) -> list[str]:
    return [".".join(part for part in name.split(".") if part != COMPILED) for name in names]
