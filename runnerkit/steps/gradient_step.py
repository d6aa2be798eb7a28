"""The weight of a loss in its optimizer step: over processes, over accumulated batches, in the tail of a loader.

A step over batches b of processes r = 1..R shall have the gradient of one process with the global batch. With g[b, r],
the gradient of a batch's mean loss, and w[b, r], its number of samples or its `batch_weight`, this is

    sum(w[b, r] * g[b, r]) / sum(w[b, r])

Engines average over processes what is backpropagated, and gradients of accumulated batches add up. So a loss is
multiplied by a factor of the process and by a relative weight of the batch, in `IEngine.backward`, for any caller, and
the gradients are divided once: sum_b(mean_r(factor * relative * g)) / divisor.

- Sizes n[b, r] that all processes know, as those of map-style loaders: factor = n[b, r] / mean_r(n[b, r]),
  relative = mean_r(n[b, r]) / unit, divisor = sum_b(relative). Nothing is communicated.
- Weights that the others do not know (streams, `batch_weight`): factor = 1, relative = w[b, r] / unit,
  divisor = mean_r(sum_b(relative)), by one asynchronous sum that runs beside the backward pass.
- Without an OptimizerCallback or `learn`, which divide the gradients, the loss itself is divided by mean_r(relative),
  for which the backward pass waits. Then each batch counts as 1.
- Losses that are sums: factor = R, which undoes the average; relative = divisor = 1.
- A process without samples in a step takes part in its collectives: factor = 0, or w = 0.

The unit cancels out. It keeps losses at their scale, which fp16 needs, and makes the relative weight of a usual batch
exactly 1, by which nothing is multiplied. Where all weights are equal, nothing is computed at all.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import TYPE_CHECKING, Any, Self

from torch import Tensor

from runnerkit.callback import ICallback, innermost, optimizer_callbacks
from runnerkit.loop.attributes import ProcessState
from runnerkit.sampling.sharding import distributed_sampler_of, share_of
from runnerkit.steps.sum_of_weights import divisor_of, on_device, total_weight
from runnerkit.support.function_members import FunctionMembers
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner
    from runnerkit.steps.idle_step import IdleStep

logger = logging.getLogger(__name__)

IDLE = "on_idle_batch_end"  # in place of on_batch_end, for a batch whose samples belong to another process


@dataclass
class WeightUnits:
    """Weights that count as 1 within a stage, so that losses keep their scale; the same on all ranks.

    Attributes:
        size: samples of a batch; None until the first batch.
        weight: of batches whose weight other processes do not know; a power of two, so that it changes no digit.
    """

    size: float | None = None
    weight: float | None = None


@dataclass(eq=False)
class GradientStep(ProcessState):
    """Weights of the losses of a pass in their optimizer steps; ``runner.gradient_step``, a new one for each pass.

    Those who make steps write what counts them: `stepped_at` and `num_steps`.

    Attributes:
        units: weights that count as 1.
        stepped_at: `batch_step` of the last optimizer step; -1 before the first.
        num_steps: optimizer steps that the batch made: several with ``learn`` only.
        is_idle: whether all samples of the current step belong to other processes; this one runs some with weight zero.
        sizes: samples of each rank in the current step, None for an unknown number; None if all have a full batch, or
            if no weight depends on them.
        matter: whether weights can change a gradient.
        accumulate: whether a step may have several batches.
        has_steppers: whether an OptimizerCallback steps, and not ``handle_batch``.
        dividers: the OptimizerCallbacks that divide the gradients of their steps, each with what says whether it acts
            in the current loader; None if it always does.
        weighed_at: `batch_step` of the last batch whose relative weight they were given.
        divided: ids of the parameters whose gradients one of them divided in the batch `divided_at`.
        factor: of this process in the current batch; None is 1.
        is_asked: whether the divisor of the current batch's step is a sum over all ranks.
        lacked_weight: whether the last loss was backpropagated before a `batch_weight` was set.
        weighed_size: the `batch_size` with which the last loss was backpropagated; None before the first.
        is_learning: whether ``learn`` backpropagates, which divides the gradients by `total`.
        total: waits for the divisor of the gradients of ``learn``; None is 1.
        outer_weigh_loss: that of the engine before the pass, of a training loader around it.
        first_uneven: batch of the loader, from 1, from which on a step may weight the processes differently.
        num_samples: samples of all ranks in a step that is not uneven; None if it is unknown.
        own_size: samples that the loader gives this process for the current step; None if nothing depends on it.
        batch_end: the event after ``handle_batch``.
        silent: keys of models whose gradients are not communicated in this batch.
        idle: what the current step must not change if it is idle.
    """

    units: WeightUnits = field(default_factory=WeightUnits)
    stepped_at: int = -1
    num_steps: int = 1
    is_idle: bool = False
    sizes: Sequence[int | None] | None = None
    matter: bool = True
    accumulate: bool = False
    has_steppers: bool = False
    dividers: Sequence[tuple[Callable[[IRunner], bool] | None, Any]] = ()
    weighed_at: int = -1
    divided: set[int] = field(default_factory=set)
    divided_at: int = -1
    factor: float | None = None
    is_asked: bool = False
    lacked_weight: bool = False
    weighed_size: int | None = None
    is_learning: bool = False
    total: Callable[[], Any] | None = None
    outer_weigh_loss: Callable[[Tensor, Any], Tensor] | None = None
    first_uneven: int = sys.maxsize
    num_samples: int | None = None
    own_size: int | None = None
    batch_end: str = "on_batch_end"
    silent: set[str] = field(default_factory=set)
    idle: IdleStep | None = None

    @classmethod
    def of_pass(cls, runner: IRunner, *, num_before: int) -> Self:
        """Start a pass. Only training loaders have weights, and all whose processes take as many batches.

        Args:
            num_before: batches that ran before the run was interrupted.
        """
        engine, step = runner.engine, cls(runner.current_run.stage.weight_units)
        step.outer_weigh_loss, engine.weigh_loss = engine.weigh_loss, None
        # Forward passes of a model that is never whole are collectives: its evaluation has batches of weight zero, too.
        if not runner.is_train_loader and not engine.never_whole:
            return step
        ranks, share = engine.data_parallel, share_of(runner.loader)
        if ranks.num_processes > 1:
            share.use_sum(ranks.start_sum)  # for a stream whose processes run out of samples at different steps
        step.factor = _base_factor(runner.loss_reduction, ranks.num_processes)
        steppers = optimizer_callbacks(runner.callbacks)
        step.has_steppers = bool(steppers)
        inner = [(_asks(each), innermost(each)) for each in runner.callbacks.values()]
        step.dividers = [pair for pair in inner if pair[1] in steppers and hasattr(pair[1], "add_weight")]
        step.accumulate = any(each.accumulation_steps > 1 for each in steppers)
        step.matter = ranks.num_processes > 1 or step.accumulate
        if step.matter:
            engine.weigh_loss = partial(step.weigh_loss, runner)  # until `end_pass`, as it refers to the runner
        if not step.matter or distributed_sampler_of(runner.loader) is not None:  # which gives each rank as many
            return step
        if share.full_size is not None:
            step.num_samples = share.stride
            is_mean = runner.loss_reduction == "mean" and runner.is_train_loader
            if ranks.num_processes > 1 and is_mean and runner.loader_key not in runner.current_run.stage.miscounted:
                step.own_size = share.batch_size
        if share.knows_sizes:
            step.first_uneven = num_before + share.first_uneven() + 1
        elif ranks.num_processes > 1:
            step.first_uneven = 1  # any step may be: the processes do not know each other's sizes
        return step

    def begin_batch(self, runner: IRunner, *, number: int) -> int | None:
        """Find out the samples of each rank in step `number` of this pass, from 0, and weight the losses of this rank.

        Called from batch `first_uneven` on. Return the samples of all ranks; None if they are unknown.
        """
        ranks, share = runner.engine.data_parallel, share_of(runner.loader)
        sizes: Any = share.sizes_of(number) if share.knows_sizes else [None] * ranks.num_processes
        own = None if sizes is None else sizes[ranks.rank]
        self.sizes = sizes
        self.is_idle = own == 0
        if self.own_size is not None:
            self.own_size = share.batch_size if own is None else own
        self.batch_end = IDLE if self.is_idle else "on_batch_end"
        self.factor = _base_factor(runner.loss_reduction, ranks.num_processes)
        if self.is_idle:
            self.factor = 0.0
        if sizes is None or None in sizes:
            return None
        total: int = sum(sizes)
        if own and runner.loss_reduction == "mean" and total != own * len(sizes):
            self.factor = own / (total / len(sizes))
        return total

    def weigh_loss(self, runner: IRunner, loss: Tensor, optimizer: Any) -> Tensor:
        """Return a loss times its weight, for ``engine.backward``; every rank must call, equally often in a batch.

        Args:
            optimizer: the one that will step on it; None is any of those of the OptimizerCallbacks, or of the user's.
        """
        is_usual = not self.accumulate or runner.batch_size == self.units.size
        factor, relative, self.lacked_weight = self.factor, None, runner.batch_weight is None
        self.weighed_size = runner.batch_size
        if not (is_usual and self.lacked_weight and self.sizes is None):
            relative = self.weigh(runner)
            factor = None if self.is_asked else self.factor  # the weight of this process says it
            acting = [each for acts, each in self.dividers if acts is None or acts(runner)]
            if _is_divided(runner, optimizer, by=acting):
                if self.weighed_at != runner.batch_step:
                    self.weighed_at = runner.batch_step
                    for each in acting:
                        each.add_weight(relative, runner, is_asked=self.is_asked)
            elif relative is None or not self.is_asked:
                relative = None  # each batch counts as 1
            elif self.is_learning:
                self.total = total_weight(runner.engine.data_parallel, relative)  # while the backward pass runs
            else:
                relative = relative / divisor_of(total_weight(runner.engine.data_parallel, relative)())
        loss = loss if relative is None else loss * relative
        return loss if factor is None else loss * factor

    def undivided(self, optimizer: Any, batch_step: int) -> list[Tensor]:
        """Return the gradients of an optimizer that no other one has divided in this batch, and note them."""
        if len(self.dividers) == 1:
            return gradients_of(optimizer)
        if self.divided_at != batch_step:
            self.divided_at, self.divided = batch_step, set()
        of_all = [each for group in optimizer.param_groups for each in group["params"]]
        left = {id(each): each.grad for each in of_all if each.grad is not None and id(each) not in self.divided}
        self.divided.update(left)
        return [*left.values()]

    def weigh(self, runner: IRunner) -> float | Tensor | None:
        """Return the relative weight of the current batch in its step, by which its loss is multiplied; None is 1.

        `is_asked` then tells whether the other processes have to be asked for theirs: see :class:`SumOfWeights`.
        Every rank must call, with `batch_weight` set on all ranks or on none. Nothing has to be weighed, and the call
        may be left out, unless `matter`, and `batch_weight` or `sizes` are set, or `accumulate` with another
        `batch_size` than ``units.size``.
        """
        self.is_asked = False
        if runner.loss_reduction == "sum":
            return None
        engine, ranks, given, units = runner.engine, runner.engine.data_parallel, runner.batch_weight, self.units
        if given is not None:
            given = _checked(given)
        sizes: Any = self.sizes
        is_alone = ranks.num_processes == 1
        is_known = given is None and (is_alone or sizes is None or None not in sizes)
        self.is_asked = not is_alone and not is_known
        if not self.is_asked and not self.accumulate:
            return None  # `factor` weights the processes
        if is_known:
            full = share_of(runner.loader).full_size
            size: Any = runner.batch_size  # that of one process is right: a `collate_fn` may have dropped samples
            if not is_alone:
                size = full or size if sizes is None else sum(sizes) / len(sizes)
            units.size = full or units.size or size
            return None if size == units.size else size / units.size
        weight = 0 if self.is_idle else runner.batch_size if given is None else given
        if units.weight is None:
            # Waits for the device, once in a stage.
            first = ranks.start_sum(on_device(weight, engine.device))().item() / ranks.num_processes
            units.weight = 2.0 ** round(math.log2(first)) if first > 0 else 1.0
        relative: float | Tensor = weight / units.weight
        return relative

    def is_due(self, runner: IRunner, every: int) -> bool:
        """Return whether the current batch reaches a multiple of `every` optimizer steps.

        Known once the optimizer has stepped: in ``on_batch_end`` after OptimizerCallbacks, and later. A step that
        ``handle_batch`` makes without ``learn`` is counted after the batch's callbacks only.
        """
        if self.stepped_at == runner.batch_step:
            return runner.optimizer_step % every < self.num_steps
        return not self.has_steppers and (runner.optimizer_step + 1) % every == 0

    def check(self, runner: IRunner) -> None:
        """Warn, once per stage, if the first batch of a pass needs other weights than those of its gradients."""
        stage = runner.current_run.stage
        if not runner.is_train_loader or not self.matter or stage.has_checked_criterion:
            return
        if runner.batch_weight is None:
            counts = self.is_asked or runner.engine.data_parallel.num_processes == 1
            if counts and self.weighed_size not in (None, runner.batch_size) and runner.loss_reduction == "mean":
                stage.has_checked_criterion = True
                if runner.engine.is_main_process:
                    logger.warning(
                        "batch_size was set to %d after the backward pass of the batch, whose gradients count as those "
                        "of %d samples: set it before self.engine.backward(loss)", runner.batch_size, self.weighed_size,
                    )  # fmt: skip
                return
            if runner.loss_reduction != "sum":
                from runnerkit.steps import normalized_losses  # late, as few runs need it

                stage.has_checked_criterion = True
                if runner.engine.is_main_process:
                    normalized_losses.warn(runner)
            return
        stage.has_checked_criterion = True
        if self.lacked_weight and runner.loss_reduction == "mean" and runner.engine.is_main_process:
            logger.warning(
                "batch_weight was set after the backward pass of the batch, so that it weights logged means, but not "
                "gradients: set it before self.engine.backward(loss)"
            )

    def warn_of_dropped_samples(self, runner: IRunner) -> None:
        """Warn once in a stage that a batch has other samples than its loader gave, which other processes do not know.

        Call at the end of a batch whose `batch_size` is not `own_size`.
        """
        if runner.batch_weight is not None or self.own_size is None:
            return
        is_miscounted = runner.batch_size > self.own_size  # probably on all ranks
        if is_miscounted:
            advice = "Set self.batch_size in handle_batch to the number of samples"
        else:
            advice = "If collate_fn drops samples, set self.batch_weight = self.batch_size in handle_batch"
        if runner.engine.is_main_process or not is_miscounted:
            logger.warning(
                "loader %r: batch %d counts as %d samples, but the loader gave rank %d %d samples, and gradients "
                "weight each process by the samples that its loader gave. %s",
                runner.loader_key, runner.loader_batch_step, runner.batch_size, runner.engine.rank, self.own_size,
                advice,
            )  # fmt: skip
        self.own_size = None
        runner.current_run.stage.miscounted.add(runner.loader_key)

    def end_pass(self, runner: IRunner) -> None:
        """Give the engine back the weights of the pass around this one: a validation within a training loader ends."""
        runner.engine.weigh_loss = self.outer_weigh_loss


def _asks(callback: ICallback) -> Callable[[IRunner], bool] | None:
    """Return the method that says whether a callback acts in a loader; None if it is that of all callbacks."""
    acts = callback.acts_in_loader
    return None if FunctionMembers(acts).function is ICallback.acts_in_loader else acts


def _is_divided(runner: IRunner, optimizer: Any, *, by: Sequence[Any]) -> bool:
    """Return whether one of these OptimizerCallbacks divides the gradients of a loss."""
    if optimizer is None or optimizer is runner.optimizer:  # any of several, or the only one
        return bool(by)
    optimizers = as_dict(runner.optimizer)
    return any(optimizers.get(each.optimizer_key or "") is optimizer for each in by)


def _checked(weight: Any) -> float | Tensor:
    """Return a batch's weight without its graph; the value of a tensor is not looked at, as the host would wait."""
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"batch_weight must be a number or a tensor of one, got shape {tuple(weight.shape)}")
        known = on_device(weight, weight.device)
        return known.reshape(()) if known.ndim else known
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"batch_weight must be a number or a tensor of one, got {type(weight).__name__}")
    number = float(weight)
    if not 0 <= number < math.inf:
        raise ValueError(f"batch_weight must be finite and >= 0, got {weight}")
    return number


def _base_factor(loss_reduction: str, num_processes: int) -> float | None:
    """Return the factor of a process with a full batch: engines average losses, also losses that sum over a batch."""
    return float(num_processes) if loss_reduction == "sum" and num_processes > 1 else None


def without_weight(runner: IRunner) -> None:
    """Let the batch of a process without a sample count nothing; the first listener after its ``handle_batch``."""
    runner.batch_size = 0
    runner.batch_weight = None if runner.batch_weight is None else 0


def gradients_of(optimizer: Any) -> list[Tensor]:
    """Return the gradients of an optimizer's parameters."""
    return [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
