"""A data set of tensors whose batches are fetched whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset

T = TypeVar("T")
Rows: TypeAlias = Any  # tuple[Tensor, ...] or dict[str, Tensor], as was given: a type checker cannot know which


class TensorRows(Dataset[Rows]):
    """Tensors of equally many rows; a batch is one ``index_select`` of each.

    For a DataLoader of your own (with workers, or with any sampler) it needs ``collate_fn=TensorRows.collate``, as what
    it fetches is a batch already; :class:`TensorLoader` needs no DataLoader.

    Args:
        tensors: (N, ...) each, on one device; or one dict of them.
        device: where batches are made; the tensors are moved there once, in the process that fetches. None is where
            they are.

    >>> rows = TensorRows({"features": torch.eye(3), "targets": torch.arange(3)})
    >>> rows.__getitems__([2, 0])["targets"], rows[1]["targets"]
    (tensor([2, 0]), tensor(1))
    """

    draws_nothing = True  # so the engine need not seed the generators for each batch

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
            indices: (n,) int64, best on the device of the tensors.
        Returns:
            A tuple or a dict, as was given, of (n, ...); copies, never views.
        """
        tensors = self._on_device()
        where = torch.as_tensor(indices, device=self.device)
        return self._like_given({name: tensor.index_select(0, where) for name, tensor in tensors.items()})

    @staticmethod
    def collate(batch: T) -> T:
        """Leave what was fetched as it is."""
        return batch

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return next(iter(self._on_device().values())).device

    def _on_device(self) -> dict[str, Tensor]:
        if self._device is not None:
            self._tensors = {name: tensor.to(self._device) for name, tensor in self._tensors.items()}
            self._device = None
        return self._tensors

    def _like_given(self, rows: dict[str, Tensor]) -> Rows:
        return rows if self._is_dict else tuple(rows.values())


def _named(tensors: tuple[Any, ...]) -> dict[str, Tensor]:
    """Check the tensors; name those of no dict by their place.

    Raises:
        TypeError: something is no tensor.
        ValueError: there are none, or they do not fit together.
    """
    if len(tensors) == 1 and isinstance(tensors[0], Mapping):
        named = dict(tensors[0])
    else:
        named = {str(place): tensor for place, tensor in enumerate(tensors)}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensor {name!r} is a {type(tensor).__name__}; give tensors, or one dict of them")
        if tensor.ndim == 0:
            raise ValueError(f"tensor {name!r} has no dimension; its first must be the samples")
    if not named:
        raise ValueError("no tensors; give at least one, (N, ...)")
    lengths = {name: len(tensor) for name, tensor in named.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the tensors must have equally many rows, got {lengths}")
    devices = {name: str(tensor.device) for name, tensor in named.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"the tensors must be on one device, got {devices}")
    return named
