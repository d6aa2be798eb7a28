"""Training steps of a single process that use as much memory as steps of all processes, on trial models."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.engines.sharding.sharded_model import ShardedModel, move_optimizer
from runnerkit.models.shards import local


class TrialModel(ShardedModel):
    """A copy of a sharded model with the same shards, but on a mesh of its own, which may not communicate.

    Args:
        model: whose user's module is copied again.
        values: of this process's shards, by name.
        options: as in :class:`ShardedModel`.
    """

    def __init__(self, model: ShardedModel, *, values: dict[str, Tensor], **options: Any) -> None:
        self._values = values
        super().__init__(model.own, **options)

    @torch.no_grad()
    def _fill(self) -> None:
        self._allocate()
        for name, shard in self.module.named_parameters():
            local(shard).copy_(self._values[name])
        self._values = {}


@contextmanager
def trial_models(
    models: Collection[ShardedModel],
    optimizers: Collection[Optimizer],
    make: Callable[..., TrialModel],
) -> Iterator[list[TrialModel]]:
    """Let optimizers step on trial copies of `models` in the body, with new state; restore them on exit.

    The memory of the models' shards and of the optimizers' state is free in the body; host memory keeps the values.

    Args:
        make: makes the trial model of a model, with the argument `values`; every rank must call it.
    """
    shards = [dict(_named(each)) for each in models]
    values = [{name: local(shard).to("cpu", copy=True) for name, shard in its.items()} for its in shards]
    kept = [(each, dict(each.state), _options(each)) for each in optimizers]
    held = [*(its.values() for its in shards), *(its.values() for _, state, _ in kept for its in state.values())]
    with offloaded(_on_device(each for its in held for each in its)):
        trials = [make(model, values=its) for model, its in zip(models, values, strict=True)]
        values.clear()
        pairs = {its[name]: other for its, trial in zip(shards, trials, strict=True) for name, other in _named(trial)}
        for optimizer in optimizers:
            move_optimizer(optimizer, pairs, convert=None)
        try:
            yield trials
        finally:
            back = {other: own for own, other in pairs.items()}
            for optimizer, by_parameter, options in kept:
                move_optimizer(optimizer, back, convert=None)
                optimizer.state.update(by_parameter)
                for group, own in zip(optimizer.param_groups, options, strict=True):
                    group.update(own)


def _named(model: ShardedModel) -> Iterator[tuple[str, nn.Parameter]]:
    names = [name for name, _ in model.own.named_parameters()]
    yield from zip(names, (shard for _, shard in model.pairs), strict=True)


def _options(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: deepcopy(each) for name, each in its.items() if name != "params"} for its in optimizer.param_groups]


def _on_device(values: Iterable[Any]) -> list[torch.UntypedStorage]:
    parts = [local(each) for each in values if isinstance(each, Tensor)]
    return [each.untyped_storage() for each in parts if each.device.type != "cpu"]


@contextmanager
def offloaded(storages: Collection[torch.UntypedStorage]) -> Iterator[None]:
    """Free the memory of `storages` in the body; afterwards they hold their bytes again, kept in host memory."""
    kept = [torch.UntypedStorage(each.nbytes(), device="cpu").copy_(each) for each in storages]
    for storage in storages:
        storage.resize_(0)
    try:
        yield
    finally:
        for storage, copy in zip(storages, kept, strict=True):
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
