"""The backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from runnerkit.callback import CallbackOrder, IBackwardCallback, innermost
from runnerkit.callbacks.training.optimizer import OptimizerCallback
from runnerkit.callbacks.training.parts.gradients import ClipFn, check_clip, clip_of_norm, gradient_norm, make_clip
from runnerkit.errors import UnknownKeyError, did_you_mean
from runnerkit.steps.learning import check_loss, clip_together
from runnerkit.support.arguments import check_numbers, check_strings
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["BackwardCallback"]


class BackwardCallback(IBackwardCallback):
    """Backpropagate a loss on training loaders; gradients are averaged over processes.

    All losses are backpropagated before any optimizer steps. If one loss reaches parameters of another loss's optimizer
    (a GAN), call ``self.engine.backward`` and ``self.engine.step`` in `handle_batch` instead.

    Args:
        metric_key: name of the loss in `batch_metrics`.
        grad_clip_fn: clips the unscaled gradients after each backward pass: a function of parameters, or the name of
            one in ``torch.nn.utils``. With accumulation_steps > 1, clip in OptimizerCallback instead.
        grad_clip_params: keyword arguments of `grad_clip_fn`.
        log_gradient: put the gradient norm before clipping into `batch_metrics` as "gradient_norm".
        gradient_clip: largest norm of these gradients, instead of `grad_clip_fn`.

    >>> BackwardCallback("loss", gradient_clip=1.0).grad_clip_fn
    'clip_grad_norm_'
    """

    def __init__(
        self,
        metric_key: str = "loss",
        grad_clip_fn: ClipFn = None,
        grad_clip_params: dict[str, Any] | None = None,
        log_gradient: bool = False,
        *,
        gradient_clip: float | None = None,
    ) -> None:
        super().__init__(order=CallbackOrder.Backward)
        check_strings(self, metric_key=metric_key)
        check_numbers(self, above=0, or_none=True, gradient_clip=gradient_clip)
        if gradient_clip is not None:
            if grad_clip_fn is not None:
                raise ValueError("BackwardCallback: pass one of gradient_clip and grad_clip_fn")
            grad_clip_fn, grad_clip_params = clip_of_norm(self, gradient_clip, grad_clip_params)
        self.metric_key = metric_key
        self.grad_clip_fn = grad_clip_fn
        self.grad_clip_params = grad_clip_params
        self.log_gradient = log_gradient
        check_clip(self, grad_clip_fn, grad_clip_params)  # raise here, not after the first batch
        self._reads_gradients = grad_clip_fn is not None or log_gradient
        self.gradient_readers: list[Callable[[list[Tensor]], None]] = []  # called before clipping
        self._key: str | None = None  # of the optimizer that steps on this loss; None: the runner has one
        self._keys: list[str] = []  # of all that do
        self._is_for_one = False
        self._steppers: list[OptimizerCallback] = []

    def on_stage_start(self, runner: IRunner) -> None:
        steppers = [innermost(each) for each in runner.callbacks.values()]
        mine = [each for each in steppers if isinstance(each, OptimizerCallback) and each.metric_key == self.metric_key]
        if self._reads_gradients and any(each.accumulation_steps > 1 for each in mine):
            raise ValueError(
                "BackwardCallback cannot clip accumulated gradients; pass gradient_clip or grad_clip_fn to "
                "OptimizerCallback instead"
            )
        self._steppers = mine
        others = [each for each in steppers if isinstance(each, BackwardCallback)]
        if others and others[0] is self:  # and those that step on the gradients of no loss of their own
            keys = {each.metric_key for each in others}
            optimizers = [each for each in steppers if isinstance(each, OptimizerCallback)]
            self._steppers = [*mine, *(each for each in optimizers if each.metric_key not in keys)]
        self._keys = [*dict.fromkeys(each.optimizer_key or "" for each in mine)] or [""]
        self._key = self._keys[0] if isinstance(runner.optimizer, dict) else None
        self._is_for_one = len(mine) == 1  # else several optimizers or handle_batch step on them
        if self._reads_gradients and not as_dict(runner.optimizer).keys() >= {*self._keys}:
            raise UnknownKeyError(f"BackwardCallback: no OptimizerCallback steps on {self.metric_key!r}; add one")

    def on_loader_start(self, runner: IRunner) -> None:
        self._is_checked = False

    def on_batch_end(self, runner: IRunner) -> None:
        if not runner.is_train_loader:
            return
        if not self._is_checked:
            self._check(runner)
        loss = runner.batch_metrics[self.metric_key]
        optimizer: Any = None
        if self._is_for_one:
            optimizer = runner.optimizer if self._key is None else runner.optimizer[self._key]
        runner.engine.backward(loss, optimizer)
        if self._reads_gradients:
            for each in self._steppers if runner.gradient_step.matter else ():
                each.average(runner)
            optimizers = [as_dict(runner.optimizer)[key] for key in self._keys]
            clip_together(runner.engine, optimizers, lambda parameters: self._clip(parameters, runner))

    def _clip(self, parameters: list[Tensor], runner: IRunner) -> None:
        for read in self.gradient_readers:
            read(parameters)
        if self.log_gradient:
            runner.batch_metrics["gradient_norm"] = gradient_norm(parameters)
        clip = make_clip(self.grad_clip_fn, self.grad_clip_params)
        if clip is not None:
            clip(parameters)

    def _check(self, runner: IRunner) -> None:
        # Only in the first batch of each pass; a later bad loss shows in the loader's mean.
        key, known = self.metric_key, sorted(runner.batch_metrics)
        if key not in known:
            meant = did_you_mean(key, known) or f"; pass criterion=, or set self.batch_metrics[{key!r}] in handle_batch"
            raise UnknownKeyError(
                f"batch_metrics of batch {runner.loader_batch_step} of loader {runner.loader_key!r} lack {key!r} to "
                f"train on, they have {known}{meant}"
            )
        check_loss(runner.batch_metrics[key], repr(key), runner)
        self._is_checked = True

    def on_stage_end(self, runner: IRunner) -> None:
        self._steppers = []

    def on_loader_end(self, runner: IRunner) -> None:
        if runner.is_train_loader:
            runner.loader_pass.metrics.check_mean(runner, self.metric_key)
