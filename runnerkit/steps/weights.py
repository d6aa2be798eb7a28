"""Weights in a training step: those of its processes, and those of the batches that are accumulated for it."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from runnerkit.callback import optimizer_callbacks
from runnerkit.sampling.sharding import distributed_sampler_of, share_of
from runnerkit.types import widest_float

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

IDLE = "on_idle_batch_end"  # in place of on_batch_end, for a batch whose samples belong to another process


class WeightUnits:
    """Weights that count as 1 within a stage, so that losses keep their scale; the same on all ranks.

    Attributes:
        size: samples of a batch; None until the first batch.
        weight: of batches whose weight other processes do not know; a power of two, so that it changes no digit.
    """

    def __init__(self) -> None:
        self.size: float | None = None
        self.weight: float | None = None


class Learned:
    """The steps of ``learn`` in a pass over a training loader.

    Attributes:
        at: `batch_step` of the batch that made the last one.
        of_batch: steps in that batch, by id of the optimizer.
        checked: ids of the optimizers whose first loss was checked.
        largest: magnitude of the largest loss; NaN if one was.
    """

    def __init__(self) -> None:
        self.at = -1
        self.of_batch: dict[int, int] = {}
        self.checked: set[int] = set()
        self.largest: Tensor | None = None


class StepSizes:
    """Weights in the steps of a pass over a training loader, as far as they are known.

    Attributes:
        first_uneven: batch of the loader, from 1, from which on a step may weight the processes differently.
        num_samples: samples of all ranks in a step that is not uneven; None if it is unknown.
        sizes: samples of each rank in the current step, None for an unknown number; None if all have a full batch.
        is_idle: whether all samples of the current step belong to other processes; this one runs some with weight zero.
        batch_end: the event after ``handle_batch``.
        is_asked: whether the weights of all ranks have to be summed.
        own_size: samples that the loader gives this process for the current step; None if nothing depends on it.
        matter: whether weights can change a gradient.
        accumulate: whether a step may have several batches.
        has_steppers: whether an OptimizerCallback steps, and not ``handle_batch``.
        silent: keys of models whose gradients are not communicated in this batch.
        stepped_at: `batch_step` of the last optimizer step.
        num_steps: optimizer steps that the batch made: several with ``learn`` only.
        learned: those that ``learn`` made.
        kept: buffers of the models, and their values from before an idle step.
        hooks: of parameters, removed after an idle step.
    """

    def __init__(self) -> None:
        self.first_uneven = sys.maxsize
        self.num_samples: int | None = None
        self.sizes: Sequence[int | None] | None = None
        self.is_idle = False
        self.batch_end = "on_batch_end"
        self.is_asked = False
        self.own_size: int | None = None
        self.matter = True
        self.accumulate = False
        self.has_steppers = False
        self.silent: set[str] = set()
        self.stepped_at = -1
        self.num_steps = 1
        self.learned = Learned()
        self.kept: list[tuple[Tensor, Tensor]] = []
        self.hooks: list[RemovableHandle] = []

    @property
    def total(self) -> int | None:
        """Samples of all ranks in the current step, if it is uneven and they are known."""
        return None if self.sizes is None else _total(self.sizes)


def sizes_of_pass(runner: IRunner, *, num_before: int) -> StepSizes:
    """Start a pass over a training loader, or over any in which all processes take as many batches.

    Args:
        num_before: batches that ran before the run was interrupted.
    """
    engine, steps, share = runner.engine, StepSizes(), share_of(runner.loader)
    ranks = engine.data_parallel
    if ranks.num_processes > 1:
        share.use_sum(ranks.start_sum)
    engine.loss_factor = _base_factor(runner)
    steppers = optimizer_callbacks(runner.callbacks)
    steps.has_steppers = bool(steppers)
    steps.accumulate = any(each.accumulation_steps > 1 for each in steppers)
    steps.matter = ranks.num_processes > 1 or steps.accumulate
    if not steps.matter or distributed_sampler_of(runner.loader) is not None:  # which gives each rank as many
        return steps
    if share.full_size is not None:
        steps.num_samples = share.stride
        is_mean = runner.loss_reduction == "mean" and runner.is_train_loader
        if ranks.num_processes > 1 and is_mean and runner.loader_key not in runner._stage.miscounted:
            steps.own_size = share.batch_size
    if share.knows_sizes:
        steps.first_uneven = num_before + share.first_uneven() + 1
    elif ranks.num_processes > 1:
        steps.first_uneven = 1
    return steps


def weigh_step(runner: IRunner, steps: StepSizes, *, number: int) -> None:
    """Find out the samples of each rank in step `number` of this pass, from 0, and weight the losses of this rank."""
    engine, ranks = runner.engine, runner.engine.data_parallel
    share = share_of(runner.loader)
    sizes = share.sizes_of(number) if share.knows_sizes else [None] * ranks.num_processes
    own = None if sizes is None else sizes[ranks.rank]
    steps.sizes = sizes
    steps.is_idle = own == 0
    if steps.own_size is not None:
        steps.own_size = share.batch_size if own is None else own
    steps.batch_end = IDLE if steps.is_idle else "on_batch_end"
    engine.loss_factor = _base_factor(runner)
    if steps.is_idle:
        engine.loss_factor = 0.0
    elif sizes is not None and own is not None and runner.loss_reduction == "mean":
        mean = _mean(sizes)
        engine.loss_factor = None if mean is None or mean == own else own / mean


def weigh_batch(runner: IRunner, steps: StepSizes, units: WeightUnits) -> float | Tensor | None:
    """Return the weight of the current batch in the step that it is accumulated for, in its unit; None is 1.

    Every rank must call, after ``handle_batch``, with `batch_weight` set on all ranks or on none.
    """
    steps.is_asked = False
    if runner.loss_reduction == "sum":
        return None
    engine, ranks, given = runner.engine, runner.engine.data_parallel, runner.batch_weight
    if given is not None:
        given = _checked(given)
    full = share_of(runner.loader).full_size
    mean = _mean(steps.sizes) if steps.sizes is not None else full or runner.batch_size
    if ranks.num_processes == 1:
        mean = runner.batch_size  # a `collate_fn` may have dropped samples
    steps.is_asked = ranks.num_processes > 1 and (given is not None or mean is None)
    if not steps.is_asked and not steps.accumulate:
        return None  # `loss_factor` weights the processes
    if not steps.is_asked and given is None:
        size = mean if mean is not None else runner.batch_size
        units.size = full or units.size or size
        return None if size == units.size else size / units.size
    weight = 0 if steps.is_idle else runner.batch_size if given is None else given
    if units.weight is None:
        first = ranks.start_sum(_on_device(weight, engine.device))().item() / ranks.num_processes
        units.weight = 2.0 ** round(math.log2(first)) if first > 0 else 1.0
    if steps.is_asked:
        engine.loss_factor = None
    share: float | Tensor = weight / units.weight
    return share


def _checked(weight: Any) -> float | Tensor:
    """Return a batch's weight without its graph; the value of a tensor is not looked at, as the host would wait."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"batch_weight must be a number or a tensor of one, got shape {tuple(weight.shape)}")
        return _on_device(weight, weight.device).reshape(())
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"batch_weight must be a number or a tensor of one, got {type(weight).__name__}")
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(f"batch_weight must be finite and >= 0, got {weight}")
    return number


def total_share(runner: IRunner, share: float | Tensor) -> Any:
    """Start to sum the shares of all ranks; return a function that waits for their mean, a number or a () tensor."""
    ranks = runner.engine.data_parallel
    total = ranks.start_sum(_on_device(share, ranks.device))
    return lambda: total() / ranks.num_processes


def divisor_of(total: Any) -> Any:
    """Return a sum of shares as the divisor of gradients: a number, or a () tensor on a GPU, without waiting for it."""
    if isinstance(total, Tensor) and total.device.type != "cpu":
        return torch.where(total == 0, 1.0, total).float()
    return float(total) or 1.0  # no batch weighs anything: its gradients are zero


def _on_device(value: float | Tensor, device: torch.device) -> Tensor:
    if isinstance(value, Tensor):
        return value.detach().to(device, widest_float(device))
    return torch.full((), value, dtype=widest_float(device), device=device)  # without a copy from the host


def _total(sizes: Sequence[int | None]) -> int | None:
    """Return the samples of all ranks; None if a size is unknown."""
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _mean(sizes: Sequence[int | None]) -> float | None:
    """Return the mean size of all ranks; None if a size is unknown."""
    total = _total(sizes)
    return None if total is None else total / len(sizes)


def _base_factor(runner: IRunner) -> float | None:
    """Return the factor of a process with a full batch: engines average losses, also those that sum over a batch."""
    num_processes = runner.engine.data_parallel.num_processes
    return float(num_processes) if runner.loss_reduction == "sum" and num_processes > 1 else None


def without_weight(runner: IRunner) -> None:
    """Let the batch of a process without a sample count nothing; the first listener after its ``handle_batch``."""
    runner.batch_size = 0
    runner.batch_weight = None if runner.batch_weight is None else 0
