"""The number of samples in a batch, which is the weight of its metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from runnerkit.support.members import field_values
from runnerkit.types import Batch

logger = logging.getLogger(__name__)


def batch_size_of(batch: Batch) -> int:
    """Return the length of the first tensor in `batch` that has a dimension; 1 if there is none.

    Searches lists, tuples, mappings and dataclasses.

    >>> import torch
    >>> batch_size_of((torch.zeros(4, 2), torch.zeros(4))), batch_size_of({"x": [torch.zeros(3)]}), batch_size_of("x")
    (4, 3, 1)
    """
    first = batch[0] if (type(batch) is tuple or type(batch) is list) and batch else batch
    if type(first) is Tensor and first.ndim:  # the most common batch; Tensor's own len() costs ten times as much
        return first.shape[0] or 1
    return _first_length(batch) or 1


def _first_length(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else None
    return next((length for each in _parts(value) if (length := _first_length(each)) is not None), None)


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    if is_dataclass(value) and not isinstance(value, type):
        return [each for _, each in field_values(value)]
    return value if isinstance(value, list | tuple) else ()


def doubt_of(
    batch: Batch, size: int, *, expected: Any, is_only: bool, given_by: str = "the loader's batch_size is"
) -> tuple[str, bool]:
    """Return why the number of samples counted in a first batch looks wrong, or "", and whether it surely is.

    Args:
        size: the number counted.
        expected: the number that the loader gave; anything but an int if it does not tell.
        is_only: whether the loader has, or may have, no other batch: one batch may be short.
        given_by: the words before `expected` in the reason.

    >>> import torch
    >>> doubt_of([torch.zeros(5), torch.zeros(4)], 5, expected=4, is_only=False)
    ("the loader's batch_size is 4", True)
    """
    reason, is_wrong = _disagreement(batch, size), False
    if isinstance(expected, int) and (size > expected or not is_only):
        # With fewer, collate_fn may have dropped samples.
        is_wrong = size > expected or (size < expected and reason != "")
        reason = f"{given_by} {expected}" if size != expected else ""
    return reason, is_wrong


def warn(key: str, size: int, reason: str) -> None:
    """Warn that the number of samples counted in the first batch of the loader `key` looks wrong."""
    logger.warning(
        "loader %r: its first batch counts as %d samples, the length of its first tensor, but %s. Metrics and "
        "accumulated gradients are weighted by this number: set self.batch_size in handle_batch to the number of "
        "samples, for example to len(images) for a list of images, to tokens.shape[1] for tensors (time, batch) or "
        "to the number of graphs", key, size, reason,
    )  # fmt: skip


def _disagreement(batch: Batch, size: int) -> str:
    """Return a description if no other part of a batch has `size` samples and some have another number."""
    parts = list(_parts(batch))
    lengths = [len(each) for each in parts if _is_column(each)]
    others = lengths[1:] if parts and isinstance(parts[0], Tensor) else lengths
    return f"its parts have the lengths {lengths}" if len(lengths) > 1 and size not in others else ""


def _is_column(part: Any) -> bool:
    return part.ndim > 0 if isinstance(part, Tensor) else isinstance(part, list | tuple)
