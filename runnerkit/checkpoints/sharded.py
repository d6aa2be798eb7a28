"""Sharded checkpoints: a folder with sharded tensors, by ``torch.distributed.checkpoint``, and one file for the rest.

The rest holds each tensor's place in the state, and the checksum of each other file.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from copy import copy
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loader
import torch.distributed.checkpoint.state_dict_saver as saver
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

from runnerkit.checkpoints.plain_state import copied
from runnerkit.storage.checksum import sha256_of
from runnerkit.support.torch_internals import TYPES_OF_SHARDED_CHECKPOINTS
from runnerkit.types import StateDict


def save(state: StateDict, folder: Path, *, rank: int, group: ProcessGroup | None) -> Callable[[], StateDict]:
    """Start writing this process's shards of `state`; every rank must call, and see `folder`.

    Args:
        group: for a thread's collectives: shards are copied now and written in the background. None writes at the end.
    Returns:
        A function that finishes and returns the rest of `state`; every rank must call it.
    """
    rest, shards, places = _split(state)
    writer = FileSystemWriter(folder, sync_files=True)
    saving: Future[Any] | None = None
    if group is not None:
        rest = copied(rest)
        saving = cast(Future[Any], saver.async_save(shards, storage_writer=writer, process_group=group))

    def finish() -> StateDict:
        try:
            saver.save(shards, storage_writer=writer) if saving is None else saving.result()
        except CheckpointException as error:
            raise OSError(f"cannot save shards in {folder}: {error}") from error
        # Each process reads back what it wrote, in parallel; rank zero also the list of all tensors.
        mine = [*folder.glob(f"__{rank}_*"), *([folder / ".metadata"] if rank == 0 else [])]
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {path.name: sha256_of(path) for path in mine}, group=group)
        return {**rest, "shards": {"places": places, "files": {name: part[name] for part in parts for name in part}}}

    return finish


def load(rest: StateDict, folder: Path, *, mesh: DeviceMesh | None = None) -> StateDict:
    """Put the tensors in `folder` into their places in `rest`.

    Args:
        mesh: processes that shard the tensors by rows, all of which must call; None loads whole tensors into this
            process alone.
    Raises:
        ValueError: a file is damaged or missing.
    """
    try:
        reader = _Reader(folder)
        tensors = {
            name: _empty(entry, mesh)
            for name, entry in reader.read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone, as intended
            loader.load(tensors, storage_reader=reader, no_dist=mesh is None)
        state = {key: value for key, value in rest.items() if key != "shards"}
        for name, place in rest["shards"]["places"].items():
            state = _with(state, place, tensors[name])
    except (CheckpointException, OSError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder} is not a complete sharded checkpoint: {error}") from error
    return state


def _split(state: StateDict) -> tuple[StateDict, dict[str, Tensor], dict[str, list[Any]]]:
    """Split `state` into the rest, its sharded tensors by name, and their places (keys from the outermost dict)."""
    shards: dict[str, Tensor] = {}
    places: dict[str, list[Any]] = {}

    def walk(value: Any, place: list[Any]) -> Any:
        if not isinstance(value, dict):
            return value
        rest = copy(value)  # with the module versions, an attribute of a model's state dict
        for key, item in value.items():
            if isinstance(item, DTensor):
                name = "/".join(map(str, [*place, key]))
                shards[name], places[name] = item, [*place, key]
                rest[key] = None
            else:
                rest[key] = walk(item, [*place, key])
        return rest

    return walk(state, []), shards, places


def _with(state: StateDict, place: list[Any], tensor: Tensor) -> StateDict:
    """Copy the dicts of `state` that lead to `place`, and put `tensor` there."""
    key, *further = place
    changed = copy(state)
    changed[key] = _with(state[key], further, tensor) if further else tensor
    return changed


def _empty(entry: TensorStorageMetadata, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None:
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    placements = [*(Replicate() for _ in range(mesh.ndim - 1)), Shard(0)]
    return empty(*entry.size, dtype=entry.properties.dtype, device_mesh=mesh, placements=placements)


class _Reader(FileSystemReader):
    """Reader of the list of tensors, which is a pickle, without running code from it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata: Metadata = _PlainUnpickler(file).load()
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that accepts only the classes of a list of tensors, as ``weights_only=True`` does for tensors."""

    def find_class(self, module: str, name: str) -> Any:
        module = {"pathlib._local": "pathlib"}.get(module, module)  # Python 3.13's name for it
        if (module, name) in TYPES_OF_SHARDED_CHECKPOINTS or (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the list of tensors must not contain {module}.{name}")
