"""Optimizer steps that `handle_batch` makes itself, with ``runner.learn`` or otherwise."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from runnerkit.errors import UnknownKeyError, check_component
from runnerkit.precision import Precision
from runnerkit.steps.diverged import advice
from runnerkit.steps.gradient_step import GradientStep, gradients_of
from runnerkit.steps.sparse_gradients import with_dense_gradients
from runnerkit.steps.sum_of_weights import divisor_of
from runnerkit.support.deprecation import warn_of_argument
from runnerkit.support.torch_internals import divide_each_, local_parts
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner
    from runnerkit.engine import IEngine

Clip = Callable[[list[Tensor]], Any]
Optimizers = str | Optimizer | Sequence[str | Optimizer] | None


@dataclass(eq=False)
class OwnSteps:
    """Optimizer steps in a pass over a training loader that ``handle_batch`` makes, with ``runner.learn`` or otherwise.

    Attributes:
        learned_at: `batch_step` of the last batch with a step of ``learn``.
        of_batch: steps in that batch, by id of the optimizer.
        checked: ids of the optimizers whose first loss was checked.
        largest: magnitude of the largest loss; NaN if one was.
    """

    learned_at: int = -1
    of_batch: dict[int, int] = field(default_factory=dict)
    checked: set[int] = field(default_factory=set)
    largest: Tensor | None = None

    def learn(
        self,
        runner: IRunner,
        loss: Tensor,
        *,
        optimizer: Optimizers,
        gradient_clip: float | None,
        clip: Clip | float | None,
    ) -> None:
        """Make a step; see :meth:`runnerkit.runner.IRunner.learn`."""
        if not runner.is_within_loader:
            raise RuntimeError("learn() makes a step within a batch: call it in handle_batch")
        if not runner.is_train_loader:
            return
        engine, step = runner.engine, runner.gradient_step
        if step.has_steppers:
            raise RuntimeError(
                "learn() makes the optimizer steps, and so does the run's OptimizerCallback: set steps_itself = True "
                "in the class of your SupervisedRunner, or leave the callback out"
            )
        chosen, clips = _chosen(runner.optimizer, optimizer), _clip_of(runner.gradient_clip, gradient_clip, clip)
        is_first = any(id(each) not in self.checked for each in chosen)
        if is_first:
            self.checked.update(map(id, chosen))
            for each in chosen:
                check_steps_without_closure(each, "learn()")
            check_loss(loss, "the loss of learn()", runner)
        for each in chosen:
            engine.zero_grad(each)
        # The optimizer computes in float32, as outside of `handle_batch`.
        kind = engine.device.type
        with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
            total = _backward(engine, loss, chosen, step)
            if is_first and not all(map(gradients_of, chosen)):
                raise RuntimeError("the loss of learn() does not depend on any parameter of the optimizer")
            if total is not None:
                for each in chosen:
                    engine.synchronize(each)
                gradients = {id(gradient): gradient for each in chosen for gradient in gradients_of(each)}
                divide_each_(local_parts(gradients.values()), divisor_of(total()))
            if clips is not None:
                clip_together(engine, chosen, clips)
            for each in chosen:
                engine.step(each)
        self._count(runner, chosen, loss.detach().abs())

    def _count(self, runner: IRunner, optimizers: list[Any], loss: Tensor) -> None:
        """Count a step: `optimizer_step` follows the optimizer that makes the most steps in a batch."""
        step = runner.gradient_step
        if self.learned_at != runner.batch_step:
            self.learned_at, self.of_batch = runner.batch_step, {}
            step.num_steps = 0
        for each in optimizers:
            self.of_batch[id(each)] = self.of_batch.get(id(each), 0) + 1
        made = max(self.of_batch[id(each)] for each in optimizers)
        if made > step.num_steps:
            step.num_steps = made
            step.stepped_at = runner.batch_step
            runner.optimizer_step += 1
            runner.stage_optimizer_step += 1
        self.largest = loss if self.largest is None else torch.maximum(self.largest, loss)  # NaN, if one is

    def finish_batch(self, runner: IRunner) -> None:
        """Count a batch without an OptimizerCallback as one step, unless ``learn`` counted its own.

        Raises:
            ValueError: a schedule was made for another number of steps.
        """
        step = runner.gradient_step
        step.stepped_at = runner.batch_step
        if self.learned_at != runner.batch_step:
            step.num_steps = 1
            runner.optimizer_step += 1
            runner.stage_optimizer_step += 1
        elif step.num_steps != runner.steps_per_batch and runner.current_run.stage.has_schedule_of_steps(runner):
            raise ValueError(
                f"num_steps was {runner.num_steps} when the scheduler was made, with {runner.steps_per_batch} steps in "
                f"each batch, but learn() made {step.num_steps} in batch {runner.loader_batch_step} of loader "
                f"{runner.loader_key!r}: set steps_per_batch in the runner's class; if the number differs between "
                "batches, use a schedule for epochs, with scheduler_interval='epoch'"
            )

    def check_losses(self, runner: IRunner) -> None:
        """Raise at the end of a training loader if a loss of ``learn`` was NaN.

        Raises:
            ValueError: with the place.
        """
        if self.largest is not None and _is_bad(float(self.largest), runner.engine.precision):
            raise ValueError(
                f"a loss of learn() became {float(self.largest)} within epoch {runner.epoch_step} of loader "
                f"{runner.loader_key!r}{advice(runner.callbacks, gradient_clip=runner.gradient_clip)}"
            )


def _chosen(optimizers: Any, wanted: Optimizers) -> list[Any]:
    by_key = as_dict(optimizers)
    if wanted is None and not by_key:
        check_component("learn()", "optimizer", None, by_key)
    chosen = [*wanted] if isinstance(wanted, list | tuple) else [wanted or ""]
    missing = [each for each in chosen if isinstance(each, str) and each not in by_key]
    if missing or not chosen:
        have = sorted(by_key) if by_key else "none"
        raise UnknownKeyError(
            f"learn() needs optimizer {missing[0] or None if missing else chosen!r}; the runner has {have}: pass "
            "optimizer=KEY, or [KEY, ...] to step several on one loss"
        )
    return [by_key[each] if isinstance(each, str) else each for each in chosen]


def _clip_of(default: float | None, gradient_clip: float | None, clip: Clip | float | None) -> Clip | None:
    """Return the function that clips; a number in the place of one is a norm, as it was before 0.2."""
    if gradient_clip is not None and clip is not None:
        raise ValueError("learn() got gradient_clip and clip: pass one of them")
    if clip is not None and not callable(clip):
        warn_of_argument("learn(clip=NUMBER)", instead=f"gradient_clip={clip}")
        gradient_clip, clip = clip, None
    norm = default if gradient_clip is None else gradient_clip
    function = partial(nn.utils.clip_grad_norm_, max_norm=norm) if clip is None and norm is not None else clip
    return None if function is None else lambda own: function(with_dense_gradients(own))


def clip_together(engine: IEngine, optimizers: Sequence[Any], clip: Clip) -> None:
    """Call `clip` once with the parameters of all optimizers."""
    if len(optimizers) == 1:
        engine.clip_gradients(optimizers[0], clip)
        return
    parameters: dict[int, Tensor] = {}  # one may belong to several optimizers
    for each in optimizers:
        engine.clip_gradients(each, lambda own: parameters.update((id(one), one) for one in own))
    joined = [*parameters.values()]
    with engine.joint_gradients(joined):
        clip(joined)


def _backward(engine: IEngine, loss: Tensor, optimizers: list[Any], step: GradientStep) -> Callable[[], Any] | None:
    """Backpropagate a loss; return a function that waits for the gradients' divisor, if there is one."""
    step.is_learning, step.total = True, None
    try:
        engine.backward(loss, optimizers[0] if len(optimizers) == 1 else None)
    finally:
        step.is_learning = False
    return step.total


def check_steps_without_closure(optimizer: Any, stepper: str) -> None:
    """Raise if the optimizer's ``step`` needs a closure, as that of LBFGS.

    Raises:
        TypeError: with what to write.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"step() of {type(optimizer).__name__} needs a closure that computes the loss, so {stepper} cannot make "
            "its steps: call self.optimizer.step(closure) in handle_batch, with steps_itself = True in a "
            "SupervisedRunner's class; docs/porting.md has an example"
        )


def check_loss(loss: Any, what: str, runner: IRunner) -> None:
    """Raise unless `loss` is a scalar to train on; waits for its value.

    Raises:
        ValueError: with the batch.
    """
    where = f"batch {runner.loader_batch_step} of loader {runner.loader_key!r}"
    if loss is None:
        raise ValueError(f"{what} in {where} is None; is a return missing in the criterion?")
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        kind = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        graph = ""
        if isinstance(loss, Tensor) and not loss.requires_grad:
            models = [each for each in as_dict(runner.model).values() if isinstance(each, nn.Module)]
            is_frozen = models and not any(each.requires_grad for model in models for each in model.parameters())
            graph = f" without a graph ({'all parameters of the model are frozen' if is_frozen else 'detached?'})"
        raise ValueError(f"{what} in {where} must be a scalar tensor with a graph, got {kind}{graph}")
    if _is_bad(loss.item(), runner.engine.precision):
        end = advice(runner.callbacks, gradient_clip=runner.gradient_clip)
        raise ValueError(f"{what} is {loss.item()} in {where}, rank {runner.engine.rank}{end}")


def _is_bad(loss: float, precision: Precision) -> bool:
    # A gradient scaler handles infinities; NaN is an error in any precision.
    return math.isnan(loss) or (math.isinf(loss) and not precision.skips_steps)
