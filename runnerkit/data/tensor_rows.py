"""A data set of tensors that fetches whole batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["TensorRows"]

T = TypeVar("T")
Rows: TypeAlias = Any  # tuple[Tensor, ...] or dict[str, Tensor], which type checkers cannot tell apart


class TensorRows(Dataset[Rows]):
    """A data set of tensors with the same number of rows; a batch is one ``index_select`` of each.

    In a DataLoader (with worker processes, or with any sampler) pass ``collate_fn=TensorRows.collate``, since it
    fetches complete batches; :class:`TensorLoader` does not need a DataLoader.

    Args:
        tensors: (N, ...) each, on one device; or one dict of them.
        device: device of the batches; the tensors are moved there once, in the process that fetches. None keeps them
            on their device.

    >>> rows = TensorRows({"features": torch.eye(3), "targets": torch.arange(3)})
    >>> rows.__getitems__([2, 0])["targets"], rows[1]["targets"]
    (tensor([2, 0]), tensor(1))
    """

    draws_nothing = True  # spares the engine seeding the generators for each batch

    def __init__(self, *tensors: Tensor | Mapping[str, Tensor], device: str | torch.device | None = None) -> None:
        self._tensors = _named(tensors)
        self._is_dict = not isinstance(tensors[0], Tensor)
        self._device = None if device is None else torch.device(device)

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    def __getitem__(self, index: int | slice) -> Rows:
        return self._like_given({name: tensor[index] for name, tensor in self._on_device().items()})

    def __getitems__(self, indices: Sequence[int] | Tensor) -> Rows:
        """Fetch a batch.

        Args:
            indices: (n,) int64, ideally on the device of the tensors.
        Returns:
            A tuple or a dict, like the input, of (n, ...); copies, never views.
        """
        tensors = self._on_device()
        where = torch.as_tensor(indices, device=self.device)
        return self._like_given({name: tensor.index_select(0, where) for name, tensor in tensors.items()})

    @staticmethod
    def collate(batch: T) -> T:
        """Return the batch unchanged."""
        return batch

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self._on_device().values())).device

    def _on_device(self) -> dict[str, Tensor]:
        if self._device is not None:
            self._tensors = {name: tensor.to(self._device) for name, tensor in self._tensors.items()}
            self._device = None
        return self._tensors

    def _like_given(self, rows: dict[str, Tensor]) -> Rows:
        return rows if self._is_dict else tuple(rows.values())


def _named(tensors: tuple[Any, ...]) -> dict[str, Tensor]:
    """Check the tensors and return them as a dict; positional ones get their position as the key.

    Raises:
        TypeError: a value is not a tensor.
        ValueError: there are no tensors, or their lengths or devices differ.
    """
    if len(tensors) == 1 and isinstance(tensors[0], Mapping):
        named = dict(tensors[0])
    else:
        named = {str(place): tensor for place, tensor in enumerate(tensors)}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensor {name!r} is a {type(tensor).__name__}; pass tensors, or one dict of them")
        if tensor.ndim == 0:
            raise ValueError(f"tensor {name!r} must have at least one dimension, the samples, got a scalar")
    if not named:
        raise ValueError("no tensors; pass at least one, (N, ...)")
    lengths = {name: len(tensor) for name, tensor in named.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the tensors must have the same number of rows, got {lengths}")
    devices = {name: str(tensor.device) for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"the tensors must be on one device, got {devices}")
    return named
