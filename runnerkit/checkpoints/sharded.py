"""Sharded checkpoints: a folder with sharded tensors, by ``torch.distributed.checkpoint``, and one file for the rest.

The rest holds each tensor's place in the state, and the checksum of each other file.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
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
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, empty

from runnerkit.checkpoints.plain_state import copied
from runnerkit.storage import claims
from runnerkit.storage.checksum import sha256_of
from runnerkit.storage.remote.urls import url_of
from runnerkit.support.torch_internals import TYPES_OF_SHARDED_CHECKPOINTS
from runnerkit.types import StateDict

_PREFIXES = ("model_state_dict.", "state_dict.", "model.")


def save(state: StateDict, folder: Path, *, rank: int, group: ProcessGroup | None) -> Callable[[], StateDict]:
    """Start writing this process's shards of `state`; every rank must call, and see `folder`.

    Args:
        group: for a thread's collectives: shards are copied now and written in the background. None writes at the end.
    Returns:
        A function that finishes and returns the rest of `state`; every rank must call it.
    """
    rest, shards, places, copies = _split(state)
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
        checksums = {path.name: sha256_of(path) for path in mine}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, (checksums, sum(path.stat().st_size for path in mine)), group=group)
        files = {name: part[name] for part, _ in parts for name in part}
        if url_of(folder) is not None:  # each process uploads its own
            if rank == 0:
                claims.announce_shards(folder, files)
            dist.barrier(group)
            claims.upload_shards(folder, checksums)
            dist.barrier(group)
        size = sum(size for _, size in parts)
        return {**rest, "shards": {"places": places, "copies": copies, "files": files, "size_bytes": size}}

    return finish


def load(rest: StateDict, folder: Path, *, mesh: DeviceMesh | None = None, but: Collection[str] = ()) -> StateDict:
    """Put the tensors in `folder` into their places in `rest`.

    Args:
        but: keys of `rest` whose tensors are not loaded.
        mesh: processes that shard the tensors as :func:`by_rows` says, all of which must call; None loads whole
            tensors into this process alone.
    Raises:
        ValueError: a file is damaged or missing.
    """
    state = {key: value for key, value in rest.items() if key != "shards"}
    with _naming(folder):
        places = {name: place for name, place in rest["shards"]["places"].items() if place[0] not in but}
        copies = rest["shards"].get("copies", {})  # absent before 0.2
        tensors = _tensors(folder, mesh, names={copies.get(name, name) for name in places})
        for name, place in places.items():
            state = _with(state, place, tensors[copies.get(name, name)])
    return state


def load_foreign(folder: Path, *, mesh: DeviceMesh | None = None) -> StateDict:
    """Load the weights in a folder that another program wrote by ``torch.distributed.checkpoint``.

    If all names begin with "model." or another key of a state that has several parts, only the model's are loaded.

    Args, Raises: as for :func:`load`.
    """
    with _naming(folder):
        names = _foreign_names(folder)
        tensors = _tensors(folder, mesh, names=names)
    return {names[name]: tensor for name, tensor in tensors.items()}


def open_parts(rest: StateDict | None, folder: Path) -> tuple[StateDict, Callable[[StateDict], StateDict]]:
    """Open a sharded checkpoint without reading its tensors.

    Args:
        rest: of the checkpoint; None for a folder of another program, of which only weights are opened.
    Returns:
        The state with tensors on the meta device, and a function that takes some of these by any name, and reads them.
    Raises:
        ValueError: a file is damaged or missing; the function raises it, too.
    """
    with _naming(folder):
        entries = _Reader(folder).read_metadata().state_dict_metadata
        shards: dict[str, Any] = rest["shards"] if rest is not None else {"places": _foreign_names(folder)}
        saved = {name: shards.get("copies", {}).get(name, name) for name in shards["places"]}
        metas = {name: _on_meta(cast(TensorStorageMetadata, entries[name])) for name in saved.values()}
    if rest is None:
        state = {shards["places"][name]: tensor for name, tensor in metas.items()}
    else:
        state = {key: value for key, value in rest.items() if key != "shards"}
        for name, place in shards["places"].items():
            state = _with(state, place, metas[saved[name]])
    name_of = {id(tensor): name for name, tensor in metas.items()}

    def read(part: StateDict) -> StateDict:
        wanted = {key: name_of[id(each)] for key, each in part.items() if each is metas.get(name_of.get(id(each), ""))}
        with _naming(folder):
            tensors = _tensors(folder, None, names=set(wanted.values()))
        return {key: tensors[wanted[key]] if key in wanted else each for key, each in part.items()}

    return state, read


def _foreign_names(folder: Path) -> dict[str, str]:
    """Map the names of a model's weights in a folder of another program to those in the model."""
    names = [
        name for name, entry in _Reader(folder).read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    ]  # fmt: skip
    prefix = next((each for each in _PREFIXES if any(name.startswith(each) for name in names)), "")
    return {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}


def _tensors(folder: Path, mesh: DeviceMesh | None, *, names: Collection[str]) -> dict[str, Tensor]:
    reader = _Reader(folder)
    entries = reader.read_metadata().state_dict_metadata
    tensors = {name: _empty(cast(TensorStorageMetadata, entries[name]), mesh) for name in entries if name in names}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # alone, as intended
        loader.load(tensors, storage_reader=reader, no_dist=mesh is None)
    return tensors


@contextmanager
def _naming(folder: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, OSError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"{folder} is not a complete sharded checkpoint: {error}") from error


def _split(state: StateDict) -> tuple[StateDict, dict[str, Tensor], dict[str, list[Any]], dict[str, str]]:
    """Split `state` into the rest, its sharded tensors by name, and their places (keys from the outermost dict).

    A tensor in two places is saved once; the last result gives the name of the first by that of the second.
    """
    shards: dict[str, Tensor] = {}
    places: dict[str, list[Any]] = {}
    copies: dict[str, str] = {}
    names: dict[int, str] = {}

    def walk(value: Any, place: list[Any]) -> Any:
        if not isinstance(value, dict):
            return value
        rest = copy(value)  # with the module versions, an attribute of a model's state dict
        for key, item in value.items():
            if isinstance(item, DTensor):
                name = "/".join(map(str, [*place, key]))
                places[name], rest[key] = [*place, key], None
                if names.setdefault(id(item), name) == name:
                    shards[name] = item
                else:
                    copies[name] = names[id(item)]
            else:
                rest[key] = walk(item, [*place, key])
        return rest

    return walk(state, []), shards, places, copies


def _with(state: StateDict, place: list[Any], tensor: Tensor) -> StateDict:
    """Copy the dicts of `state` that lead to `place`, and put `tensor` there."""
    key, *further = place
    changed = copy(state)
    changed[key] = _with(state[key], further, tensor) if further else tensor
    return changed


def _empty(entry: TensorStorageMetadata, mesh: DeviceMesh | None) -> Tensor:
    if mesh is None or not entry.size:  # rows of a scalar do not exist
        return torch.empty(entry.size, dtype=entry.properties.dtype)
    return empty(*entry.size, dtype=entry.properties.dtype, device_mesh=mesh, placements=by_rows(mesh))


def by_rows(mesh: DeviceMesh) -> list[Placement]:
    """Return the placements of tensors with rows divided along the dimension of `mesh` named "shards..."."""
    return [Shard(0) if name.startswith("shards") else Replicate() for name in mesh.mesh_dim_names or ()]


def _on_meta(entry: TensorStorageMetadata) -> Tensor:
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")


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
