"""Broadcast of a checkpoint's state from rank zero to all ranks, in parts."""

from __future__ import annotations

import io
import pickle
from typing import Any, TypeVar

import torch
from torch import Tensor

from runnerkit.engine import IEngine

T = TypeVar("T")
PART_BYTES = 64 * 2**20


def broadcast_state(value: T, engine: IEngine, *, part_bytes: int = PART_BYTES) -> T:
    """Return rank zero's `value`; every rank must call.

    Pickled as a whole, a state of many gigabytes would be in each rank's memory three times: as objects, as a pickle,
    and as the bytes in transit. So tensors are sent separately: `part_bytes` at a time, or one larger tensor.
    """
    if engine.num_processes == 1:
        return value
    parts, rest = _taken_apart(value, part_bytes) if engine.is_main_process else ([], b"")
    num_parts, rest = engine.broadcast_object((len(parts), rest))
    tensors = list[Tensor]()
    for index in range(num_parts):
        sent = engine.broadcast_object([_alone(each) for each in parts[index]] if parts else [])
        if not parts:
            tensors += sent
    return value if engine.is_main_process else _Unpickler(rest, tensors).load()


def _taken_apart(value: Any, part_bytes: int) -> tuple[list[list[Tensor]], bytes]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    parts, size = [list[Tensor]()], 0
    for tensor in pickler.tensors:
        if parts[-1] and size + tensor.nbytes > part_bytes:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.nbytes
    return parts, file.getvalue()


def _alone(tensor: Tensor) -> Tensor:
    """Copy a view, because its whole storage would be sent with it."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


class _Pickler(pickle.Pickler):
    """Pickler that sets tensors aside."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, value: Any) -> int | None:
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout != torch.strided:
            return None
        if id(value) not in self._places:
            self._places[id(value)] = len(self.tensors)
            self.tensors.append(value)
        return self._places[id(value)]


class _Unpickler(pickle.Unpickler):
    """Unpickler that puts them back; its input comes from rank zero of this job."""

    def __init__(self, rest: bytes, tensors: list[Tensor]) -> None:
        super().__init__(io.BytesIO(rest))
        self._tensors = tensors

    def persistent_load(self, place: int) -> Tensor:
        return self._tensors[place]
