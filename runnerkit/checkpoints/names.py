"""Names of weights, without what wrappers of modules add to them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from copy import copy as shallow_copy

from torch import nn

from runnerkit.support.component_members import ModuleMembers
from runnerkit.support.torch_internals import COMPILED, METADATA, metadata_of
from runnerkit.types import StateDict

OF_PEFT = "base_model.model."  # prepended by peft, which no other library removes
_ADDED_BY_PEFT = re.compile(r"^\.base_model\.model\.|\.base_layer\.|\.original_module\.|\.modules_to_save\.[^.]+\.")
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


def under_adapters(module: nn.Module, state: StateDict, own: StateDict) -> StateDict:
    """Return weights of a model without adapters under the names that they have in `module`, to which peft has added
    some; the adapters' weights are those in `own`. Other weights are returned unchanged.

    Args:
        own: the weights of `module`, under their names in checkpoints.
    """
    layers = tuple(f"{name}." for name, each in module.named_modules() if ModuleMembers(each).adapter_layer_names)
    if not layers:
        return state
    without = {name: _ADDED_BY_PEFT.sub(".", f".{name}").removeprefix(".") for name in own}
    adapters = {name for name in own if name.startswith(layers) and without[name] == name.removeprefix(OF_PEFT)}
    bare = dict(zip(bare_names(list(state)), state.values(), strict=True))
    if not adapters or adapters & bare.keys() or bare.keys().isdisjoint(without.values()):
        return state
    named, known = shallow_copy(state), {*without.values()}
    named.clear()
    named.update((name, value) for name, value in bare.items() if name not in known)  # torch refuses them
    named.update((name, bare[its]) for name, its in without.items() if its in bare)
    named.update((name, own[name]) for name in adapters)
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
