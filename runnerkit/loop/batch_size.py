"""The number of samples in a batch, which is the weight of its metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runnerkit.sampling.loader_members import LoaderMembers
from runnerkit.support.members import field_values
from runnerkit.types import Batch

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

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


def check(runner: IRunner) -> None:
    """Warn, once per loader, if the number of samples counted in its first batch looks wrong.

    A size set by `handle_batch` is not checked.
    """
    current, key, size = runner.loader_pass, runner.loader_key, runner.batch_size
    batch, current.first_batch = current.first_batch, None
    if key in runner.current_run.stage.checked_batch_sizes:
        return
    runner.current_run.stage.checked_batch_sizes.add(key)
    if size != batch_size_of(batch):
        return
    expected, reason = LoaderMembers(runner.loader).batch_size, _disagreement(batch, size)
    if isinstance(expected, int) and (size > expected or (runner.loader_batch_len or 0) > 1):  # one batch may be short
        if size > expected or (size < expected and reason):  # otherwise collate_fn may have dropped samples
            runner.current_run.stage.miscounted.add(key)
            runner.gradient_step.own_size = None
        reason = f"the loader's batch_size is {expected}" if size != expected else ""
    if reason and runner.engine.is_main_process:
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
