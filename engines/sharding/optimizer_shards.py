"""State of optimizers that step on shards: saved whole, loaded by shards, and kept from one stage to the next."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from runnerkit.engines.sharding.meta_model import MetaModel
from runnerkit.engines.sharding.sharded_model import ShardedModel, move_optimizer
from runnerkit.models.shards import shard_like, whole
from runnerkit.seeding.initialization import mark_left_to_checkpoint
from runnerkit.types import StateDict, parameters_of


def check_known(optimizer: Optimizer, shards: Collection[nn.Parameter], *, key: str) -> None:
    """Raise if the optimizer cannot step on `shards`: it has parameters of no model, or state on the meta device.

    Frozen parameters may belong to a frozen model, which is not sharded.
    """
    if any(
        isinstance(each, torch.Tensor) and each.is_meta for its in optimizer.state.values() for each in its.values()
    ):
        raise ValueError(
            f"optimizer {key!r}: {type(optimizer).__name__} makes its state before parameters have values, so "
            "init='meta' cannot train with it; use another optimizer, such as AdamW"
        )
    for parameter in parameters_of(optimizer):
        if parameter.requires_grad and parameter not in shards:
            raise ValueError(
                f"optimizer {key!r} holds a parameter of shape {tuple(parameter.shape)} that is not part of any "
                "trained model; create it from model.parameters()"
            )


def whole_state_dict(optimizer: Optimizer) -> StateDict:
    """Return the optimizer's state with whole tensors in host memory; every rank must call this."""
    state = optimizer.state_dict()
    by_parameter = {  # moved one by one: together they may be larger than the device
        index: {name: on_device(whole(value), torch.device("cpu")) for name, value in each.items()}
        for index, each in state["state"].items()
    }
    return {**state, "state": by_parameter}


def load_state_dict(optimizer: Optimizer, state: StateDict) -> None:
    """Load whole or sharded state."""
    saved = [index for group in state["param_groups"] for index in group["params"]]
    like = dict(zip(saved, parameters_of(optimizer), strict=False))  # if they do not match, the optimizer raises
    by_parameter = {
        index: {name: shard_like(value, like[index]) for name, value in each.items()} if index in like else each
        for index, each in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": by_parameter})


def on_device(value: Any, device: torch.device) -> Any:
    """Move a tensor; return other values unchanged."""
    return value.to(device) if isinstance(value, torch.Tensor) else value


class KeptShards:
    """The shards of models on the meta device, and of their optimizers' state, from one stage to the next."""

    def __init__(self) -> None:
        self._weights: dict[nn.Module, StateDict] = {}
        self._state: dict[nn.Parameter, StateDict] = {}

    def keep(
        self,
        models: Collection[ShardedModel],
        optimizers: Collection[Optimizer],
        owners: dict[nn.Parameter, nn.Parameter],
    ) -> None:
        """Take the shards; the user's objects keep none of them.

        Args:
            owners: maps shards to the user's parameters.
        """
        for model in models:
            self._weights[model.own] = model.module.state_dict()
            if not (isinstance(model, MetaModel) and model.is_initial):
                mark_left_to_checkpoint(model.own)
        for optimizer in optimizers:
            self._state |= {own: optimizer.state[shard] for shard, own in owners.items() if shard in optimizer.state}
            move_optimizer(optimizer, owners, convert=None)

    def take_weights(self, own: nn.Module) -> StateDict | None:
        """Return the sharded weights of the user's module; None if there are none."""
        return self._weights.pop(own, None)

    def give_state(self, optimizer: Optimizer, owners: dict[nn.Parameter, nn.Parameter]) -> None:
        """Give an optimizer that steps on shards the state that was kept for the user's parameters."""
        shard: nn.Parameter
        for shard in parameters_of(optimizer):
            if kept := self._state.pop(owners.get(shard, shard), None):
                optimizer.state[shard] = kept
