"""Meshes of all processes, for sharding, and their process groups."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from runnerkit.support.torch_internals import backend_without_communication

# DTensor keeps the meshes of operations, and takes one with equal ranks and names to have the same process groups, even
# if they were destroyed and made again.
_MESHES = itertools.count()


def mesh_of(sizes: Mapping[str, int], device: torch.device, *, timeout_s: float) -> DeviceMesh:
    """Create a mesh of all processes; every rank must call.

    Args:
        sizes: number of processes by the beginning of the dimension's name; one may be -1.
        timeout_s: of the groups; those of a one-dimensional mesh are the default group, with a timeout of its own.
    """
    if len(sizes) == 1:
        return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=_names(sizes))
    return _mesh_of(sizes, device, timeout_s=timeout_s, backend=None)


def mesh_without_communication(sizes: Mapping[str, int], device: torch.device, *, timeout_s: float) -> DeviceMesh:
    """Create a mesh of the same processes that does not communicate; every rank must call."""
    return _mesh_of(sizes, device, timeout_s=timeout_s, backend=backend_without_communication())


def _names(sizes: Mapping[str, int]) -> tuple[str, ...]:
    number = next(_MESHES)
    return tuple(f"{name}_{number}" for name in sizes)


def _mesh_of(sizes: Mapping[str, int], device: torch.device, *, timeout_s: float, backend: str | None) -> DeviceMesh:
    # Groups are made here, because those of init_device_mesh would use torch's default timeout, half an hour.
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    rows = [ranks.movedim(dim, -1).reshape(-1, ranks.shape[dim]) for dim in range(ranks.ndim)]
    groups = [group_of(each, timeout_s=timeout_s, backend=backend) for each in rows]
    given = groups if len(groups) > 1 else groups[0]
    return DeviceMesh.from_group(given, device.type, mesh=ranks, mesh_dim_names=_names(sizes))


def group_of(rows: torch.Tensor, *, timeout_s: float, backend: str | None = None) -> Any:
    """Create a process group of each row of ranks; return that of this process."""
    make: Callable[..., tuple[Any, Any]] = dist.new_subgroups_by_enumeration  # untyped in torch
    return make(rows.tolist(), timeout=timedelta(seconds=timeout_s), backend=backend)[0]


def dims_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the names of a mesh's dimensions."""
    assert mesh.mesh_dim_names is not None
    return mesh.mesh_dim_names
