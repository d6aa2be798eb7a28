"""Sharded tensors: this process's part of them, whole ones from their parts, and parts of whole ones."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from runnerkit.support import torch_internals
from runnerkit.support.device_move import rebuilt


def local(shard: Tensor) -> Tensor:
    """Return this process's part of `shard`, sharing its memory."""
    part: Tensor = torch_internals.local(shard.detach())
    return part


def chunk(value: Tensor, *, like: Tensor) -> Tensor:
    """Return this process's part of a full tensor, sharded in the same way as `like`."""
    assert isinstance(like, DTensor)
    mesh, part = like.device_mesh, value.detach()
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this process has a place in the mesh"
    # Tensor parallelism, the last dimension of a mesh, divides first, and fully_shard divides what it leaves.
    for index, size, placement in reversed([*zip(coordinate, mesh.shape, like.placements, strict=True)]):
        if (dim := getattr(placement, "dim", None)) is not None:
            chunks = part.chunk(size, dim=dim)
            part = chunks[index] if index < len(chunks) else part.narrow(dim, 0, 0)
    return part


def shard_like(value: Any, like: Tensor) -> Any:
    """Shard `value` if it has a parameter's shape; other state, such as a counter, stays whole.

    No communication, except for a value that is sharded in another way: then every rank must call this.
    """
    if not isinstance(value, Tensor) or value.shape != like.shape or not isinstance(like, DTensor):
        return value
    if isinstance(value, DTensor):
        if (value.device_mesh, value.placements) == (like.device_mesh, like.placements):
            return value
        value = whole(value)
    shard = torch.empty_like(like, dtype=value.dtype, requires_grad=False)
    local(shard).copy_(chunk(value, like=like))
    return shard


def whole(value: Any) -> Any:
    """Gather a sharded tensor on the compute device; return other values unchanged. Every rank must call this."""
    if not isinstance(value, DTensor):
        return value
    on_device = cast(DTensor, value.detach().to(value.device_mesh.device_type))  # shards may be in host memory
    placements = list(on_device.placements)
    for index in range(len(placements) - 1):  # one dimension after the other: torch warns of several at once
        placements[index] = Replicate()
        on_device = on_device.redistribute(placements=placements)
    return on_device.full_tensor()


def whole_state(state: Any) -> Any:
    """Gather the sharded tensors in nested dicts, lists and tuples, in host memory; every rank must call this.

    A tensor that `state` holds in two places is gathered once, and is one tensor in the result too.
    """
    return _whole_state(state, known={})


def _whole_state(state: Any, *, known: dict[int, Tensor]) -> Any:
    if isinstance(state, DTensor):
        if id(state) not in known:  # moved one by one: together they may be larger than the device
            known[id(state)] = whole(state).cpu()
        return known[id(state)]
    return rebuilt(state, partial(_whole_state, known=known)) if isinstance(state, dict | list | tuple) else state
