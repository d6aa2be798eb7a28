"""A warning if a criterion divides by something else than the number of samples, and no batch weight says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from runnerkit.types import as_dict

logger = logging.getLogger(__name__)


def warn(criteria: Any, batch: Any) -> None:
    """Warn if losses of several batches or processes are averaged by the wrong weights.

    Call once per stage, at the end of a training batch whose weight can matter and is not set, for losses that are
    means. Waits for the device once.
    """
    for criterion in as_dict(criteria).values():
        what = _divisor_of(criterion, batch)
        if what is not None:
            logger.warning(
                "%s(%s) is a mean over %s, but gradients and the logged mean weight the batches of a step, and the "
                "processes, by their numbers of samples: set self.batch_weight in handle_batch, see 'Weights' in "
                "docs/data.md", type(criterion).__name__, *what,
            )  # fmt: skip
            return


def _divisor_of(criterion: Any, batch: Any) -> tuple[str, str] | None:
    """Return the argument that changes what a mean is divided by, and the divisor in words; None if it is samples."""
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss) or criterion.reduction != "mean":
        return None
    if criterion.weight is not None:
        return "weight=...", "the class weights of its targets"
    ignored = criterion.ignore_index
    return (f"ignore_index={ignored}", "the other targets") if ignored >= 0 or _holds(batch, ignored) else None


def _holds(batch: Any, value: int) -> bool:
    """Return whether a tensor of integers in `batch` has an element of this value; waits for the device once."""
    found = [(each == value).any() for each in _integers(batch)]
    return bool(found) and bool(torch.stack([each.to(found[0].device) for each in found]).any())


def _integers(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if not value.is_floating_point() and not value.is_complex():
            yield value
        return
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    for each in parts:
        yield from _integers(each)
