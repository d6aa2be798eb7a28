"""Sharded copy of the user's model with ``fully_shard``, and optimizers moved to its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from runnerkit.engines.sharding.gather_precision import GatherPrecision
from runnerkit.engines.sharding.shard_policy import ShardPolicy
from runnerkit.models.shards import chunk, local, shard_like, whole
from runnerkit.support.torch_internals import drop_held_gradients, num_changes
from runnerkit.types import StateDict, parameters_of


class ShardedModel:
    """The user's full module, which stays unchanged, and a sharded copy of it, which is trained.

    Args:
        own: the user's module; every rank gets rank zero's weights. Each process keeps it on its current device.
        mesh: (shards,) or (replicas, shards) processes.
        divide: divides weights among processes that work on the same samples; called with the copy.
        policy: the units to gather and free as one.
        reshard_after_forward: whether a unit's parameters are freed until its backward pass gathers them again.
        cpu_offload: keep shards, gradients and the optimizer's state in host memory.
        precision: precision in which weights are gathered.
    """

    def __init__(
        self,
        own: nn.Module,
        *,
        mesh: DeviceMesh,
        divide: Callable[[nn.Module], None] | None,
        policy: ShardPolicy,
        reshard_after_forward: bool,
        cpu_offload: bool,
        precision: GatherPrecision,
    ) -> None:
        self.own = own
        self._device = torch.device(mesh.device_type)
        self._memory = torch.device("cpu") if cpu_offload else self._device
        self._reshard_after_forward = reshard_after_forward
        self._has_held_gradients = False
        for tensor in (*own.parameters(), *own.buffers()):
            if not tensor.is_meta:
                self._broadcast(tensor)
        self.module = _copy(own)
        if divide is not None:
            divide(self.module)
        offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=self._device.type == "cuda")
        offload = offload if cpu_offload else OffloadPolicy()
        full = precision.full_precision_units(self.module)
        for unit in [*full, *(each for each in policy.units(self.module) if each not in full)]:
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=precision.policy(is_full=unit in full),
                offload_policy=offload,
                reshard_after_forward=reshard_after_forward,
            )
        # The root unit is not freed, as its backward pass comes next.
        root = precision.policy(is_root=True)
        fully_shard(self.module, mesh=mesh, mp_policy=root, offload_policy=offload, reshard_after_forward=False)
        self._fill()
        kept = [cast(FSDPModule, self.module)] if reshard_after_forward else self._units()
        self._kept = [_KeptUnit(each, _own_parameters(each)) for each in kept]
        # Stored, as the module holds full parameters while they are gathered. By name, a tied one under each of them.
        self.shards = dict(self.module.named_parameters(remove_duplicate=False))
        self.pairs = [(parameter, self.shards[name]) for name, parameter in own.named_parameters()]

    def _fill(self) -> None:
        """Give the shards of parameters on the meta device memory and values."""

    def _allocate(self) -> None:
        """Give the shards of parameters on the meta device memory."""
        self.module._apply(lambda each: torch.empty_like(each, device=self._memory) if each.is_meta else each)

    def unshard(self) -> None:
        """Gather and keep all weights, so that forward passes do not communicate; every rank must call this."""
        self.reshard()
        for unit in self._units():
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        for buffer in self.module.buffers():
            self._broadcast(buffer)

    def reshard(self) -> None:
        """Free what :meth:`unshard` gathered."""
        for unit in self._units():
            is_freed = self._reshard_after_forward and unit is not cast(FSDPModule, self.module)
            unit.set_reshard_after_forward(is_freed, recurse=False)
            unit.reshard()

    def free_kept(self, optimizer: Optimizer, optimizers: Sequence[Optimizer]) -> None:
        """Free what a forward pass gathered, and no backward pass freed, before a step: it would be out of date.

        What only other `optimizers` step on, and nobody has changed, stays for its backward pass.
        """
        others = {id(each) for one in optimizers if one is not optimizer for each in parameters_of(one)}
        others -= {id(each) for each in parameters_of(optimizer)} if others else others
        for kept in self._kept:
            is_others = all(id(each) in others or not each.requires_grad for each in kept.shards)
            if not others or not is_others or kept.num_changes != kept.changes_now():
                kept.unit.reshard()

    def note_changes(self) -> None:
        """Note the state of the shards after a step, to see whether anything but a step changes them."""
        for kept in self._kept:
            kept.num_changes = kept.changes_now()

    @torch.no_grad()
    def gather(self) -> nn.Module:
        """Copy the trained weights and rank zero's buffers into the user's module; every rank must call this."""
        for parameter, shard in self.pairs:
            parameter.copy_(whole(shard))
        buffers = dict(self.module.named_buffers())
        for name, buffer in self.own.named_buffers():
            self._broadcast(buffers[name])
            buffer.copy_(buffers[name])
        for mine, theirs in zip(self.own.modules(), self.module.modules(), strict=True):
            mine.training = theirs.training
            if type(mine).get_extra_state is not nn.Module.get_extra_state:
                mine.set_extra_state(theirs.get_extra_state())
        return self.own

    def load(self, state: StateDict) -> None:
        """Load weights, sharded or whole, under the names of the user's module.

        Raises:
            RuntimeError: names or shapes differ.
        """
        if any(isinstance(value, DTensor) for value in state.values()):
            self.reshard()  # gathered parameters would be out of date
            self._load_shards(state)
        else:
            self.own.load_state_dict(state)
            self.scatter()

    def _load_shards(self, state: StateDict) -> None:
        """Load tensors, sharded in any way or whole; of whole ones only a part is read."""
        own = self.module.state_dict()
        shards = {name: like for name, like in own.items() if isinstance(like, DTensor)}
        self.module.load_state_dict(
            {name: shard_like(value, shards[name]) if name in shards else whole(value) for name, value in state.items()}
        )

    @torch.no_grad()
    def scatter(self) -> None:
        """Load the weights and buffers of the user's module, which must be the same on all ranks."""
        self.reshard()  # gathered parameters would be out of date
        for parameter, shard in self.pairs:
            local(shard).copy_(chunk(parameter, like=shard))
        buffers = dict(self.own.named_buffers())
        for name, buffer in self.module.named_buffers():
            buffer.copy_(buffers[name])
        for mine, theirs in zip(self.own.modules(), self.module.modules(), strict=True):
            if type(mine).set_extra_state is not nn.Module.set_extra_state:
                theirs.set_extra_state(mine.get_extra_state())

    @contextmanager
    def holding_gradients(self) -> Iterator[None]:
        """Let backward passes keep full gradients in this process, for a later pass to reduce."""
        self._has_held_gradients = True
        cast(FSDPModule, self.module).set_requires_gradient_sync(False)
        try:
            yield
        finally:
            cast(FSDPModule, self.module).set_requires_gradient_sync(True)

    def drop_held_gradients(self, optimizer: Optimizer) -> None:
        """Discard gradients that were held and never reduced, if they are those of `optimizer`."""
        mine = {id(each) for each in parameters_of(optimizer)} if self._has_held_gradients else set()
        if not any(id(shard) in mine for _, shard in self.pairs):
            return
        self._has_held_gradients = False
        for unit in self._units():
            drop_held_gradients(unit)

    def _units(self) -> list[FSDPModule]:
        return [each for each in self.module.modules() if isinstance(each, FSDPModule)]

    @torch.no_grad()
    def _broadcast(self, tensor: Tensor) -> None:
        sent = tensor.detach().to(self._device).contiguous()
        dist.broadcast(sent, src=0)
        tensor.copy_(sent)


@dataclass(eq=False)
class _KeptUnit:
    """A unit that stays gathered after its forward pass, and how often its shards had changed after the last step."""

    unit: FSDPModule
    shards: list[nn.Parameter]

    def __post_init__(self) -> None:
        self.num_changes = self.changes_now()

    def changes_now(self) -> int:
        return sum(map(num_changes, self.shards))


def _own_parameters(unit: FSDPModule) -> list[nn.Parameter]:
    """Return the parameters of a unit without those of units within it."""
    modules: list[Any] = [unit]
    for each in modules:  # grows
        modules += [child for child in each.children() if not isinstance(child, FSDPModule)]
    return [parameter for each in modules for parameter in each.parameters(recurse=False)]


def _copy(own: nn.Module) -> nn.Module:
    try:
        module = deepcopy(own)
    except Exception as error:
        raise TypeError(
            f"{type(own).__name__} cannot be copied; sharding trains a copy and leaves your module whole: {error}"
        ) from error
    for parameter in module.parameters():
        parameter.data = parameter.data.contiguous()  # channels_last weights cannot be sharded
    return module


def move_optimizer(
    optimizer: Optimizer,
    parameters: dict[nn.Parameter, nn.Parameter],
    convert: Callable[[Any, nn.Parameter], Any] | None,
) -> None:
    """Move `optimizer` and its state to other parameters.

    Args:
        parameters: maps old parameters to new ones.
        convert: maps (a value of the state, the new parameter) to the new value; None discards the state.
    """
    state: dict[Tensor, Any] = {}
    for group in optimizer.param_groups:
        for old in group["params"]:
            if convert is not None and old in optimizer.state:
                kept = optimizer.state[old]
                new: Any = parameters.get(old, old)  # itself, of a frozen model
                state[new] = kept if new is old else {name: convert(value, new) for name, value in kept.items()}
        group["params"] = [parameters.get(old, old) for old in group["params"]]  # the user may have added others
    for name, own in vars(optimizer).items():  # LBFGS steps on a list of its own
        if isinstance(own, list) and own and all(isinstance(each, nn.Parameter) and each in parameters for each in own):
            setattr(optimizer, name, [parameters[old] for old in own])
    optimizer.state.clear()
    optimizer.state.update(state)
