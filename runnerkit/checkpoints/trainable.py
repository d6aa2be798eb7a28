"""Weights without those that are frozen, which a hash identifies, such as adapters of a pretrained model."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from runnerkit.checkpoints.names import without_compiled
from runnerkit.support.torch_internals import METADATA, metadata_of
from runnerkit.types import StateDict

FROZEN_HASH = "frozen_sha256"  # beside the version of the model in its state dict's attribute, which torch ignores


def frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters without ``requires_grad``, under their names in checkpoints."""
    named = without_compiled(dict(module.named_parameters(remove_duplicate=False)))
    return {name: each for name, each in named.items() if not each.requires_grad}


def trainable_part(module: nn.Module, state: StateDict, sha256: str) -> StateDict:
    """Return `state`, weights of `module`, without frozen parameters but with the hash of all of them."""
    frozen = frozen_parameters(module)
    part = OrderedDict((name, value) for name, value in state.items() if name not in frozen)
    metadata = metadata_of(state)
    setattr(part, METADATA, {**metadata, "": {**metadata.get("", {}), FROZEN_HASH: sha256}})
    return part


def is_trainable_part(state: StateDict) -> bool:
    """Return whether `state` is a :func:`trainable_part`, not all of a model's weights."""
    return FROZEN_HASH in metadata_of(state).get("", {})


def completed(
    module: nn.Module, state: StateDict, own: StateDict, *, source: str, whole: Callable[[Tensor], Tensor] | None = None
) -> StateDict:
    """Return `state`, completed from `own` if it is a :func:`trainable_part`; otherwise itself.

    Args:
        own: the weights of `module`, under their names in checkpoints.
        whole: gathers one of them if they are sharded; then every rank must call this.
    Raises:
        ValueError: the frozen parameters of `module` are not those of the model that was trained.
    """
    expected = metadata_of(state).get("", {}).get(FROZEN_HASH)
    if expected is None:
        return state
    frozen = {name: own.get(name, each) for name, each in frozen_parameters(module).items() if name not in state}
    if hash_of(frozen, whole=whole) != expected:
        raise ValueError(
            f"{source} holds the trainable part of a model whose frozen parameters had other values than this model's "
            f"{len(frozen)}: load the same pretrained weights, and freeze the same parameters, before"
        )
    complete = OrderedDict((name, state[name] if name in state else own[name]) for name in own)
    complete.update((name, each) for name, each in state.items() if name not in complete)  # torch refuses or accepts it
    setattr(complete, METADATA, metadata_of(state))
    return complete


def hash_of(parameters: Mapping[str, Tensor], *, whole: Callable[[Tensor], Tensor] | None = None) -> str:
    """Return the SHA-256 of names, dtypes, shapes and values; one parameter at a time is gathered by `whole` and copied
    to the host.

    >>> hash_of({"weight": torch.zeros(2)})[:8]
    '0b15b00b'
    """
    digest = hashlib.sha256()
    for name, each in sorted(parameters.items()):
        digest.update(f"{name} {each.dtype} {tuple(each.shape)}\n".encode())
        value = each.detach() if whole is None else whole(each.detach())
        digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
