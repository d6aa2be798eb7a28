"""From the loss to gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runnerkit.arguments import check_strings
from runnerkit.callback import CallbackOrder, IBackwardCallback, innermost
from runnerkit.callbacks.gradients import ClipFn, check_clip, gradient_norm, make_clip
from runnerkit.callbacks.optimizer import OptimizerCallback
from runnerkit.types import as_dict
from runnerkit.unknown_key import UnknownKeyError

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class BackwardCallback(IBackwardCallback):
    """Backpropagate a loss on training loaders; gradients are averaged over processes.

    All losses go backward before any optimizer steps. Where one loss reaches parameters of another's optimizer (a GAN),
    call ``self.engine.backward`` and ``self.engine.step`` in `handle_batch` instead.

    Args:
        metric_key: name of the loss in `batch_metrics`.
        grad_clip_fn: clips true (unscaled) gradients after each backward: a function of parameters, or the name of one
            in ``torch.nn.utils``. With accumulation_steps > 1 pass it to OptimizerCallback.
        grad_clip_params: its arguments.
        log_gradient: put the gradients' norm, before clipping, into `batch_metrics` as "gradient_norm".

    >>> BackwardCallback("loss", grad_clip_fn="clip_grad_norm_", grad_clip_params={"max_norm": 1.0}).metric_key
    'loss'
    """

    def __init__(
        self,
        metric_key: str = "loss",
        grad_clip_fn: ClipFn = None,
        grad_clip_params: dict[str, Any] | None = None,
        log_gradient: bool = False,
    ) -> None:
        super().__init__(order=CallbackOrder.Backward)
        check_strings(self, metric_key=metric_key)
        self.metric_key = metric_key
        self.grad_clip_fn = grad_clip_fn
        self.grad_clip_params = grad_clip_params
        self.log_gradient = log_gradient
        check_clip(self, grad_clip_fn, grad_clip_params)  # refuse bad arguments here, not after the first batch
        self._reads_gradients = grad_clip_fn is not None or log_gradient
        self.gradient_readers: list[Callable[[list[Tensor]], None]] = []  # called before clipping
        self._key: str | None = None  # of the optimizer whose gradients they are; None: the runner has one
        self._is_for_one = False

    def on_stage_start(self, runner: IRunner) -> None:
        steppers = [innermost(each) for each in runner.callbacks.values()]
        mine = [each for each in steppers if isinstance(each, OptimizerCallback) and each.metric_key == self.metric_key]
        if self._reads_gradients and any(each.accumulation_steps > 1 for each in mine):
            raise ValueError(
                "BackwardCallback would clip gradients that still accumulate; pass grad_clip_fn to OptimizerCallback"
            )
        optimizer_key = (mine[0].optimizer_key if mine else None) or ""
        self._key = optimizer_key if isinstance(runner.optimizer, dict) else None
        self._is_for_one = len(mine) == 1  # else gradients are those of several optimizers, or of whoever steps by hand
        if self._reads_gradients and optimizer_key not in as_dict(runner.optimizer):
            raise UnknownKeyError(f"whose gradients? no OptimizerCallback steps on {self.metric_key!r}; add one")

    def on_loader_start(self, runner: IRunner) -> None:
        self._is_checked = False

    def on_batch_end(self, runner: IRunner) -> None:
        if not runner.is_train_loader:
            return
        if not self._is_checked:
            self._check(runner.batch_metrics.get(self.metric_key), runner)
        loss = runner.batch_metrics[self.metric_key]
        optimizer: Any = None
        if self._is_for_one or self._reads_gradients:
            optimizer = runner.optimizer if self._key is None else runner.optimizer[self._key]
        runner.engine.backward(loss, optimizer if self._is_for_one else None)
        if self._reads_gradients:
            runner.engine.clip_gradients(optimizer, lambda parameters: self._clip(parameters, runner))

    def _clip(self, parameters: list[Tensor], runner: IRunner) -> None:
        for read in self.gradient_readers:
            read(parameters)
        if self.log_gradient:
            runner.batch_metrics["gradient_norm"] = gradient_norm(parameters)
        clip = make_clip(self.grad_clip_fn, self.grad_clip_params)
        if clip is not None:
            clip(parameters)

    def _check(self, loss: Any, runner: IRunner) -> None:
        # The first batch of each pass; a loss that goes wrong later shows in the loader's mean.
        where = f"batch {runner.loader_batch_step} of loader {runner.loader_key!r}"
        if loss is None:
            raise UnknownKeyError(
                f"no {self.metric_key!r} to train on at {where}; batch_metrics has {sorted(runner.batch_metrics)}"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            kind = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            graph = " without a graph (detached?)" if isinstance(loss, Tensor) and not loss.requires_grad else ""
            raise ValueError(
                f"{self.metric_key!r} at {where} must be a scalar tensor with a graph, got one {kind}{graph}"
            )
        # A scaler lives with infinities; a loss that is no number is none in any precision.
        if torch.isnan(loss) or (torch.isinf(loss) and not runner.engine.precision.skips_steps):
            raise ValueError(f"{self.metric_key!r} is {loss.item()} at {where}, rank {runner.engine.rank}")
        self._is_checked = True

    def on_loader_end(self, runner: IRunner) -> None:
        mean = runner.loader_metrics.get(self.metric_key)
        if not runner.is_train_loader or mean is None:
            return
        if math.isnan(mean) or (math.isinf(mean) and not runner.engine.precision.skips_steps):
            raise ValueError(
                f"{self.metric_key!r} became {mean} within epoch {runner.epoch_step} of loader {runner.loader_key!r}; "
                "the last checkpoint is from before. Try a smaller learning rate or grad_clip_fn='clip_grad_norm_'"
            )
