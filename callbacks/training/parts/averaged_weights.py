"""An average of a module's weights, by the functions of ``torch.optim.swa_utils``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit.support.torch_internals import is_dtensor, local
from runnerkit.types import StateDict

# (averages, weights, number of averaged weights): updates the averages in place.
AverageFn = Callable[[list[Tensor], list[Tensor], int], None]


class AveragedWeights:
    """The average of a module's weights during training. Of sharded weights, each process averages its own shards.

    Args:
        module: the one that is trained.
        own: the user's module; the same as `module`, unless the latter is a sharded copy of it.
        average: torch's ``get_ema_multi_avg_fn(decay)`` or ``get_swa_multi_avg_fn()``.
        use_buffers: whether to average buffers too; otherwise they equal the module's.

    Attributes:
        is_sharded: True if each process has only a part of the weights.
    """

    def __init__(self, module: nn.Module, *, own: nn.Module, average: AverageFn, use_buffers: bool) -> None:
        self.module = module
        self.num_averaged = 0
        self.is_sharded = any(map(is_dtensor, module.parameters()))
        self._average = average
        self._use_buffers = use_buffers
        self._averaged = _sharded_copy(own, like=module) if self.is_sharded else deepcopy(module)
        # Stored, as a module holds other parameters while they are gathered.
        self._pairs = list(zip(self._tensors(self._averaged), self._tensors(module), strict=True))
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []
        self._state: StateDict | None = None

    def _tensors(self, module: nn.Module) -> Iterator[Tensor]:
        return chain(module.parameters(), module.buffers() if self._use_buffers else ())

    def _parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield averages and weights, or this process's parts of them, sharing their memory."""
        for mine, theirs in self._pairs:
            yield local(mine.detach()), local(theirs.detach())

    @torch.no_grad()
    def update(self) -> None:
        """Include the module's weights in the average; the first update copies them. No communication."""
        self._state = None
        if not self.num_averaged:
            for mine, theirs in self._parts():
                mine.copy_(theirs)
        else:  # like AveragedModel, which in each step also copies its counter to the device and synchronizes
            for averages, weights in self._groups or self._group():
                self._average(averages, weights, self.num_averaged)
        self.num_averaged += 1

    def _group(self) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Group the parts by device and dtype, for kernels that act on many; shards stay in place from the first step
        on."""
        groups: dict[tuple[torch.device, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
        for mine, theirs in self._parts():
            if mine.numel():  # of a small parameter, some processes may not have a row
                averages, weights = groups.setdefault((mine.device, mine.dtype), ([], []))
                averages.append(mine)
                weights.append(theirs)
        self._groups = list(groups.values())
        return self._groups

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap the average and the module's weights; a second call swaps them back. No communication."""
        for mine, theirs in self._parts():
            weights = theirs.clone()
            theirs.copy_(mine)
            mine.copy_(weights)

    @torch.no_grad()
    def weights(self) -> StateDict:
        """Return the average as the module's ``state_dict``, the same objects until the next update, which changes its
        tensors in place."""
        if not self._use_buffers:
            for mine, theirs in zip(self._averaged.buffers(), self.module.buffers(), strict=True):
                mine.copy_(theirs)
        if self._state is None:
            self._state = self._averaged.state_dict()
        return self._state

    def state_dict(self) -> StateDict:
        """Return the state to resume from."""
        return {"num_averaged": self.num_averaged, "weights": self.weights() if self.num_averaged else {}}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the result of :meth:`state_dict`, sharded or whole; every rank must call this."""
        self.num_averaged, self._state = state["num_averaged"], None
        if self.num_averaged:
            self._averaged.load_state_dict(self._as_sharded(state["weights"]))

    def _as_sharded(self, weights: StateDict) -> StateDict:
        if not self.is_sharded:
            return weights
        from runnerkit.models.shards import shard_like  # half a second, for sharded models only

        own = self._averaged.state_dict()
        return {name: shard_like(value, own[name]) if name in own else value for name, value in weights.items()}


def _sharded_copy(own: nn.Module, *, like: nn.Module) -> nn.Module:
    """Copy the user's module with parameters that are sharded as those of `like`, and without values."""
    shards, buffers = dict(like.named_parameters(remove_duplicate=False)), dict(like.named_buffers())
    copies: dict[int, Any] = {
        id(each): nn.Parameter(torch.empty_like(shards[name].detach()), each.requires_grad)
        for name, each in own.named_parameters()
    }
    copies |= {id(each): buffers[name].clone() for name, each in own.named_buffers()}
    return deepcopy(own, copies)
