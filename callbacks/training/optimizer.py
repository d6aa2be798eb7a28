"""The optimizer step: gradient accumulation, averaging and clipping."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runnerkit import callbacks  # for BackwardCallback, whose module imports this one: it is found when first used
from runnerkit.callback import CallbackOrder, IBackwardCallback, IOptimizerCallback, innermost
from runnerkit.callbacks.training.parts.gradients import ClipFn, check_clip, clip_of_norm, make_clip
from runnerkit.errors import check_component, did_you_mean
from runnerkit.steps.gradient_step import WeightUnits, gradients_of
from runnerkit.steps.learning import check_steps_without_closure
from runnerkit.steps.learning_rates import rates_of
from runnerkit.steps.sum_of_weights import SumOfWeights
from runnerkit.support.arguments import check_integers, check_numbers, check_strings
from runnerkit.support.deprecation import Renamed, accepts_old_names
from runnerkit.support.torch_internals import divide_each_, local_parts
from runnerkit.types import StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["OptimizerCallback"]

logger = logging.getLogger(__name__)


class OptimizerCallback(IOptimizerCallback):
    """Step an optimizer on training loaders; log the learning rates of its groups once per epoch.

    A metric of the user named "lr" or "momentum" is logged instead of the optimizer's.

    Without a BackwardCallback, and if `handle_batch` leaves no gradients, it also backpropagates the loss.

    Args:
        metric_key: name of the loss whose gradients it steps on.
        model_key: which model, if the runner has several; its gradients are not communicated while they accumulate.
        optimizer_key: which optimizer, if the runner has several.
        accumulation_steps: batches whose gradients are averaged into one step, weighted by their numbers of samples or
            by ``runner.batch_weight``; the last step of a loader averages the remaining ones, which are dropped if the
            loader is ended early. With 1 it is the runner's `accumulation_steps`.
        grad_clip_fn: clips the unscaled gradients of the whole step: a function of parameters, or the name of one
            in ``torch.nn.utils``. Instead of a parameter with a sparse gradient it gets the rows that this concerns,
            with a dense one.
        grad_clip_params: keyword arguments of `grad_clip_fn`.
        grad_clip_value: largest magnitude of each of its gradients.
        gradient_clip: largest norm of all its gradients together; pass one of this, `grad_clip_value` and
            `grad_clip_fn`. Without any, ``runner.gradient_clip`` is the norm of the gradients of all such optimizers
            that step on the batch.
        log_momentum: also log the momentum, or the first beta, of the optimizer.

    >>> OptimizerCallback("loss", accumulation_steps=4).accumulation_steps
    4
    """

    @accepts_old_names(Renamed("grad_clip_norm", "gradient_clip"), by_position=("grad_clip_norm", "grad_clip_value"))
    def __init__(
        self,
        metric_key: str = "loss",
        model_key: str | None = None,
        optimizer_key: str | None = None,
        accumulation_steps: int = 1,
        grad_clip_fn: ClipFn = None,
        grad_clip_params: dict[str, Any] | None = None,
        *,
        grad_clip_value: float | None = None,
        gradient_clip: float | None = None,
        log_momentum: bool = False,
    ) -> None:
        super().__init__(order=CallbackOrder.Optimizer)
        check_numbers(self, above=0, or_none=True, grad_clip_value=grad_clip_value, gradient_clip=gradient_clip)
        if sum(each is not None for each in (gradient_clip, grad_clip_fn, grad_clip_value)) > 1:
            raise ValueError(f"{type(self).__name__}: pass one of gradient_clip, grad_clip_value and grad_clip_fn")
        if gradient_clip is not None:
            grad_clip_fn, grad_clip_params = clip_of_norm(self, gradient_clip, grad_clip_params)
        if grad_clip_value is not None:
            grad_clip_fn, grad_clip_params = "clip_grad_value_", {"clip_value": grad_clip_value}
        check_integers(self, accumulation_steps=accumulation_steps)
        check_strings(self, metric_key=metric_key)
        check_strings(self, or_none=True, model_key=model_key, optimizer_key=optimizer_key)
        self.metric_key = metric_key
        self.model_key = model_key
        self.log_momentum = log_momentum
        self.optimizer_key = optimizer_key
        self.own_accumulation_steps = self.accumulation_steps = accumulation_steps
        self.grad_clip_fn = grad_clip_fn
        self.grad_clip_params = grad_clip_params
        check_clip(self, grad_clip_fn, grad_clip_params)  # raise here, not after the first batch
        self.gradient_readers: list[Callable[[list[Tensor]], None]] = []  # called before clipping
        self.num_pending = 0  # batches since the last step
        self.num_skipped = 0  # steps of this loader that the gradient scaler skipped
        self._steps_now = self._may_be_silent = True
        self._weights = SumOfWeights()  # of the pending batches
        self._is_averaged = False
        self._units = WeightUnits()
        self._clip_fn: Callable[[list[Tensor]], Any] | None = None
        self._partners: list[OptimizerCallback] = []  # those that `gradient_clip` clips together; empty if it is alone
        self._is_clipped = False
        self._silence: ExitStack | None = None  # active while gradients are not communicated
        self._checked: Any = None  # the optimizer known to have gradients
        self._backward: tuple[IBackwardCallback, ...] | None = None  # its own; None before the first batch of a stage
        self._key = optimizer_key or None  # None: the runner has one

    def on_stage_start(self, runner: IRunner) -> None:
        optimizers = as_dict(runner.optimizer)
        check_component(self, "optimizer", self.optimizer_key, optimizers)
        check_steps_without_closure(optimizers[self.optimizer_key or ""], type(self).__name__)
        self._key = (self.optimizer_key or "") if isinstance(runner.optimizer, dict) else None
        self._checked = self._backward = None
        self._units = runner.current_run.stage.weight_units
        clip_fn, clip_params = self.grad_clip_fn, self.grad_clip_params
        if clip_fn is None and runner.gradient_clip is not None:
            clip_fn, clip_params = "clip_grad_norm_", {"max_norm": runner.gradient_clip}
        self._clip_fn = make_clip(clip_fn, clip_params)
        steppers = [each for each in map(innermost, runner.callbacks.values()) if isinstance(each, OptimizerCallback)]
        partners = [each for each in steppers if each.grad_clip_fn is None] if runner.gradient_clip is not None else []
        self._partners = partners if self in partners and len(partners) > 1 else []
        self._steps_now = not self._partners  # one that does not act is left out
        paces = {each.accumulation_steps for each in steppers}
        if len(paces) > 1 and runner.engine.precision.skips_steps:
            raise ValueError(
                f"OptimizerCallbacks accumulate {sorted(paces)} batches, but fp16 has one gradient scale for all "
                "of them: pass the same accumulation_steps to each, or use bf16"
            )
        # With different intervals, a backward pass without communication may precede another optimizer's step.
        self._may_be_silent = len(paces) == 1

    def on_loader_start(self, runner: IRunner) -> None:
        if runner.is_train_loader:
            self.num_pending = 0
            self.num_skipped = self.num_skipped if runner.loader_batch_step else 0  # a resumed loader has skipped some
        for each in self._backward or ():
            each.on_loader_start(runner)

    def on_batch_start(self, runner: IRunner) -> None:
        if not runner.is_train_loader:
            return
        if self.num_pending == 0:
            optimizer = runner.optimizer if self._key is None else runner.optimizer[self._key]
            runner.engine.zero_grad(optimizer)
            if not self._weights.is_empty:
                self._weights.reset()
            self._is_averaged = self._is_clipped = False
        is_last = runner.loader_batch_step == runner.loader_batch_len
        self._steps_now = is_last or self.num_pending + 1 >= self.accumulation_steps
        if not self._steps_now and self._may_be_silent:
            silent = runner.gradient_step.silent
            self._silence = ExitStack()
            for key, model in as_dict(runner.model).items():
                if self.model_key in (None, key) and key not in silent:  # not by another optimizer of the same model
                    silent.add(key)
                    self._silence.callback(silent.discard, key)
                    self._silence.enter_context(runner.engine.accumulate(model))

    def on_batch_end(self, runner: IRunner) -> None:
        if not runner.is_train_loader:
            return
        if self._backward is None:
            _find_backward(self, runner)
        for each in self._backward or ():
            each.on_batch_end(runner)
        if self._silence is not None:
            self._silence.close()
            self._silence = None
        self.num_pending += 1
        if self._steps_now:
            self._step(runner)

    def add_weight(self, relative: float | Tensor | None, runner: IRunner, *, is_asked: bool) -> None:
        """Note what ``runner.gradient_step.weigh`` returned, before the backward pass; every rank must call."""
        self._weights.add(relative, runner, is_asked=is_asked, is_last=self._steps_now)

    def average(self, runner: IRunner) -> None:
        """Make the gradients of a step its mean, once, before this callback's own ``on_batch_end`` or loader's end."""
        optimizer = runner.optimizer if self._key is None else runner.optimizer[self._key]
        runner.engine.synchronize(optimizer)
        self._average(optimizer, runner, num_batches=self.num_pending + runner.is_within_loader)

    def _step(self, runner: IRunner) -> None:
        optimizer = runner.optimizer if self._key is None else runner.optimizer[self._key]
        runner.engine.synchronize(optimizer)
        is_mean = self.num_pending == 1 and self._weights.is_empty and self._checked is optimizer
        if not is_mean and not self._is_averaged:
            self._average(optimizer, runner, num_batches=self.num_pending)
        if self._partners:
            if not self._is_clipped:
                self._clip_together(runner)
            self._steps_now = False
        elif self._clip_fn is not None or self.gradient_readers:
            runner.engine.clip_gradients(optimizer, self._clip)
        self.num_skipped += not runner.engine.step(optimizer)
        self.num_pending = 0
        step = runner.gradient_step
        if step.stepped_at != runner.batch_step:  # the first of several optimizers
            step.stepped_at = runner.batch_step
            runner.optimizer_step += 1
            runner.stage_optimizer_step += 1

    def _clip_together(self, runner: IRunner) -> None:
        """Clip one norm over the gradients of all partners that step now, before the first of them does."""
        parameters: dict[int, Tensor] = {}  # one may belong to several optimizers

        def collect(partner: OptimizerCallback, own: list[Tensor]) -> None:
            for read in partner.gradient_readers:
                read(own)
            parameters.update((id(each), each) for each in own)

        for each in (partner for partner in self._partners if partner._steps_now and not partner._is_clipped):
            optimizer = runner.optimizer if each._key is None else runner.optimizer[each._key]
            if each is not self and not each._is_averaged:
                each.average(runner)
            runner.engine.clip_gradients(optimizer, partial(collect, each))
            each._is_clipped = True
        assert self._clip_fn is not None
        joined = [*parameters.values()]
        with runner.engine.joint_gradients(joined):
            self._clip_fn(joined)

    def _clip(self, parameters: list[Tensor]) -> None:
        for read in self.gradient_readers:
            read(parameters)
        if self._clip_fn is not None:
            self._clip_fn(parameters)

    def _average(self, optimizer: Any, runner: IRunner, *, num_batches: int) -> None:
        self._is_averaged = True
        divisor = self._weights.divisor(runner, num_batches=num_batches)
        if self._checked is not optimizer and not gradients_of(optimizer):
            key, known = self.metric_key, sorted(runner.batch_metrics)
            lacks = f"; batch_metrics lack {key!r}, they have {known}{did_you_mean(key, known)}" * (key not in known)
            raise RuntimeError(
                f"no parameter of the optimizer has a gradient: add BackwardCallback({key!r}), or call "
                f"self.engine.backward(loss) in handle_batch{lacks}"
            )
        self._checked = optimizer
        if isinstance(divisor, Tensor) or divisor != 1:
            gradients = runner.gradient_step.undivided(optimizer, runner.batch_step)
            divide_each_(local_parts(gradients), divisor)

    def state_dict(self) -> StateDict:
        units = {"size_unit": self._units.size, "weight_unit": self._units.weight}
        skipped = {"num_skipped": self.num_skipped} if self.num_skipped else {}
        return {name: unit for name, unit in units.items() if unit is not None} | skipped

    def load_state_dict(self, state: StateDict) -> None:
        self._units.size, self._units.weight = state.get("size_unit"), state.get("weight_unit")  # absent before 0.2
        self.num_skipped = state.get("num_skipped", 0)

    def on_loader_end(self, runner: IRunner) -> None:
        if not runner.is_train_loader:
            return
        for each in self._backward or ():
            each.on_loader_end(runner)
        # The loader ended at an unexpected batch. Gradients that were not communicated are dropped, even with a single
        # process, so that all engines behave the same.
        if self.num_pending and not self._may_be_silent:
            for partner in self._partners:
                partner._steps_now = partner.num_pending > 0
            self._step(runner)
        self.num_pending = 0
        suffix = f"_{self.optimizer_key}" if self.optimizer_key else ""
        key = self.optimizer_key or ""
        optimizer = as_dict(runner.optimizer)[key]
        own = rates_of(optimizer, key=key, factor=runner.current_run.stage.rate_factors.get(key, 1.0))
        group = optimizer.param_groups[0]
        if self.log_momentum and ("betas" in group or "momentum" in group):
            own[f"momentum{suffix}"] = float(group["betas"][0] if "betas" in group else group["momentum"])
        if runner.engine.precision.skips_steps:
            own[f"skipped_steps{suffix}"] = float(self.num_skipped)
        for name, value in own.items():
            runner.loader_metrics.setdefault(name, value)  # a user's metric of this name is kept


def _find_backward(first: OptimizerCallback, runner: IRunner) -> None:
    """Let the first OptimizerCallback backpropagate the losses of all, if nothing else does.

    Asked once a stage, at the end of its first training batch, when the gradients of `handle_batch` are there.
    """
    inner = [innermost(each) for each in runner.callbacks.values()]
    steppers = [each for each in inner if isinstance(each, OptimizerCallback)]
    for each in steppers:
        each._backward = ()
    if any(isinstance(each, IBackwardCallback) for each in inner):
        return
    optimizers = as_dict(runner.optimizer)
    without = [each for each in steppers if not gradients_of(optimizers.get(each.optimizer_key or ""))]
    losses = {each.metric_key: runner.batch_metrics.get(each.metric_key) for each in without}
    keys = [key for key, loss in losses.items() if isinstance(loss, Tensor) and loss.requires_grad]
    if not keys:
        return  # the step explains that there are no gradients
    if runner.engine.is_main_process:
        named = " and ".join(map(repr, keys))
        logger.warning(
            "OptimizerCallback backpropagates %s itself, as there is no BackwardCallback and handle_batch left no "
            "gradients: pass BackwardCallback(%r) to have other callbacks in between",
            named,
            keys[0],
        )
    first._backward = tuple(map(callbacks.BackwardCallback, keys))
    for backward in first._backward:
        backward.on_stage_start(runner)
        backward.on_loader_start(runner)
