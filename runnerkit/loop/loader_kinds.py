"""Checks that what is passed as a loader yields batches, and messages with what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from types import GeneratorType
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

_ONCE = (GeneratorType, zip, map, filter, enumerate)


def check_loader(loader: Any, name: str) -> None:
    """Raise unless `loader` can be iterated over batches.

    Args:
        name: of the loader in messages, such as "loader 'train'".
    Raises:
        TypeError: with what to pass instead.
    """
    what = f"{name} is a {type(loader).__name__}"
    if isinstance(loader, type):
        raise TypeError(f"{name} is the class {loader.__name__}; pass an instance of it: {loader.__name__}(...)")
    if hasattr(loader, "iloc"):  # of pandas: it yields the names of its columns
        values = "DataLoader(TensorDataset(torch.tensor(frame.to_numpy())), batch_size=...)"
        raise TypeError(f"{what}; pass a loader of its rows, such as {values}")
    if isinstance(loader, Tensor | np.ndarray):  # its rows would be mistaken for batches
        raise TypeError(f"{what}; pass a loader of its rows, such as DataLoader(TensorDataset(tensor), batch_size=...)")
    is_iterable = isinstance(loader, Iterable) or hasattr(loader, "__getitem__")
    if isinstance(loader, str | bytes) or not is_iterable:
        raise TypeError(f"{what}; expected a DataLoader or an iterable of batches")
    if isinstance(loader, Dataset) and not isinstance(loader, Iterable):  # its samples would be mistaken for batches
        raise TypeError(
            f"{what}, a data set: pass DataLoader(dataset, batch_size=...), with batch_size=None if its items are "
            "whole batches"
        )


def ends_for_good(loader: Any) -> bool:
    """Return whether `loader` is an iterator of a kind that cannot begin again, such as a generator."""
    return isinstance(loader, _ONCE) or type(loader).__name__.endswith("DataLoaderIter")
