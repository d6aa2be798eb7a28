"""A warning if a criterion divides by something else than the number of samples, and no batch weight says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


def warn(runner: IRunner) -> None:
    """Warn if losses of several batches or processes are averaged by the wrong weights.

    Call once per stage, at the end of a training batch whose weight can matter and is not set, for losses that are
    means. Waits for the device once.
    """
    for loss in _losses(runner):
        what = _divisor_of(loss, runner.batch)
        if what is not None:
            logger.warning(
                "%s(%s) is a mean over %s, but gradients and the logged mean weight the batches of a step, and the "
                "processes, by their numbers of samples: set self.batch_weight in handle_batch, see 'Weights' in "
                "docs/data.md", loss.name, *what,
            )  # fmt: skip
            return


class _Loss(NamedTuple):
    name: str
    weight: Any
    ignore_index: int
    reduction: str


def _losses(runner: IRunner) -> Iterator[_Loss]:
    """Yield the losses of torch that divide by targets: criteria and the runner's own, parts of modules included."""
    for held in vars(runner).values():
        for each in as_dict(held).values():
            if isinstance(each, nn.Module):
                for part in each.modules():
                    if isinstance(part, nn.CrossEntropyLoss | nn.NLLLoss):
                        yield _Loss(type(part).__name__, part.weight, part.ignore_index, part.reduction)
                continue
            function, given = (each.func, each.keywords) if isinstance(each, partial) else (each, {})
            if function in (functional.cross_entropy, functional.nll_loss):
                ignored, reduction = given.get("ignore_index", -100), given.get("reduction", "mean")
                yield _Loss(function.__name__, given.get("weight"), ignored, reduction)


def _divisor_of(loss: _Loss, batch: Any) -> tuple[str, str] | None:
    """Return the argument that changes what a mean is divided by, and the divisor in words; None if it is samples."""
    if loss.reduction != "mean":
        return None
    if loss.weight is not None:
        return "weight=...", "the class weights of its targets"
    ignored = loss.ignore_index
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
