"""Learning rate range test: a sweep over rates at which the loss falls and finally diverges."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from runnerkit.callback import Callback, CallbackOrder, innermost
from runnerkit.errors import UnknownKeyError, check_component
from runnerkit.history.plot import finish_axes, literal, new_figure, save_figure
from runnerkit.storage.remote.copies import name_of, written
from runnerkit.support.arguments import check_integers, check_numbers, check_strings
from runnerkit.types import StateDict, as_dict
from runnerkit.warmup import set_lr

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["LRFinder"]

logger = logging.getLogger(__name__)

_PAST = 0.9  # weight of earlier losses in the smoothed loss
_DIVERGED = 4.0  # multiple of the lowest smoothed loss at which the sweep ends


class LRFinder(Callback):
    """Increase the learning rate with each batch, from the optimizer's to `final_lr`, and record the losses; then the
    stage ends.

    This is the range test of Smith 2015 (arXiv:1506.01186). It ends early if the loss diverges: if it is not finite, or
    if the smoothed loss exceeds four times its minimum (for a positive minimum). Only the optimizer's learning rates
    are restored; weights, batch norm statistics and momenta keep the changes of the sweep, so train a newly constructed
    model. Loaders after the sweep run one batch.

    Args:
        final_lr: rate of the last batch, above the optimizer's.
        scale: "log" increases the rate by a constant factor, "linear" by a constant difference.
        num_steps: number of batches, >= 2; None is one pass over the training loader.
        optimizer_key: which optimizer, if the runner has several. Its parameter groups keep their ratio to the first
            group, whose rates are recorded.
        metric_key: name of the loss.

    Attributes:
        lrs, losses: of each batch; losses are means over all processes. Complete after the run, under DDP too.
        smoothed_losses: exponential means of the losses up to each batch.

    >>> LRFinder(final_lr=1.0).scale
    'log'
    """

    shapes_training = True

    def __init__(
        self,
        final_lr: float,
        scale: Literal["log", "linear"] = "log",
        num_steps: int | None = None,
        optimizer_key: str | None = None,
        metric_key: str = "loss",
    ) -> None:
        # After the criterion, and before BackwardCallback, which raises if the mean loss of a loader is not finite.
        super().__init__(order=CallbackOrder.Backward - 1)
        if scale not in ("log", "linear"):
            raise ValueError(f"LRFinder: scale must be 'log' or 'linear', got {scale!r}")
        check_numbers(self, above=0, final_lr=final_lr)
        check_integers(self, least=2, or_none=True, num_steps=num_steps)
        check_strings(self, metric_key=metric_key)
        check_strings(self, or_none=True, optimizer_key=optimizer_key)
        self.final_lr = final_lr
        self.scale = scale
        self.num_steps = num_steps
        self.optimizer_key = optimizer_key
        self.metric_key = metric_key
        self.lrs: list[float] = []
        self.losses: list[float] = []
        self.smoothed_losses: list[float] = []
        self._own_lrs: list[float] = []
        self._num_steps = 0
        self._mean = 0.0  # starts at 0; the bias is corrected below

    @property
    def suggestion(self) -> float:
        """A tenth of the rate at which the smoothed loss was lowest; above that rate it no longer fell.

        Raises:
            RuntimeError: there was no sweep yet.
        """
        if not self.smoothed_losses:
            raise RuntimeError("LRFinder suggests a rate only after a sweep: pass it to train(callbacks=[...]) first")
        return self.lrs[self.smoothed_losses.index(min(self.smoothed_losses))] / 10

    def plot(self, path: str | Path) -> Path:
        """Plot losses against rates and mark the suggestion; save a PNG, also to a URL, and return its path."""
        figure = new_figure(wanted_by="LRFinder.plot")
        axes = figure.add_subplot()
        axes.plot(self.lrs, self.losses, alpha=0.3, label=literal(self.metric_key))
        axes.plot(self.lrs, self.smoothed_losses, color="C0", label="smoothed")
        axes.axvline(self.suggestion, color="C1", linestyle="--", label=f"suggestion {self.suggestion:.2g}")
        axes.set_xscale(self.scale)
        axes.set_xlabel("lr")
        # Limit the y axis: the last losses are so large that the earlier decrease would look flat.
        axes.set_ylim(min(self.losses), 2 * self.smoothed_losses[0])
        finish_axes(axes)
        with written(path) as local:
            save_figure(figure, local)
        return name_of(path)

    def on_stage_start(self, runner: IRunner) -> None:
        optimizers = as_dict(runner.optimizer)
        check_component(self, "optimizer", self.optimizer_key, optimizers)
        others = [each for each in map(innermost, runner.callbacks.values()) if isinstance(each, LRFinder)]
        if sum((each.optimizer_key or "") == (self.optimizer_key or "") for each in others) > 1:
            raise ValueError("two LRFinders sweep the learning rate of the same optimizer: pass only one")
        if (self.optimizer_key or "") in as_dict(runner.scheduler):
            raise ValueError("LRFinder sets the learning rate of each batch: leave out the scheduler in its run")
        self.lrs, self.losses, self.smoothed_losses, self._mean = [], [], [], 0.0
        self._own_lrs = [float(group["lr"]) for group in self._groups(runner)]
        if not 0 < self._own_lrs[0] < self.final_lr:
            raise ValueError(
                f"LRFinder starts from the optimizer's lr, which must be between 0 and final_lr={self.final_lr}, got "
                f"{self._own_lrs[0]}"
            )

    def on_loader_start(self, runner: IRunner) -> None:
        if not runner.is_train_loader or self._is_over:
            return
        num_steps = self.num_steps or runner.loader_batch_len
        if num_steps is None or num_steps < 2:
            raise ValueError(
                f"LRFinder makes one pass over loader {runner.loader_key!r}, whose length is {num_steps or 'unknown'}: "
                "pass num_steps >= 2"
            )
        self._num_steps = num_steps

    def on_batch_start(self, runner: IRunner) -> None:
        if runner.is_train_loader and not self._is_over:
            self._set_lrs(runner, self._factor(len(self.lrs)))

    def on_batch_end(self, runner: IRunner) -> None:
        if runner.is_train_loader and not self._is_over:
            self._note(runner)
        if self._is_over:
            runner.need_early_stop = True  # ends this loader only

    def on_loader_end(self, runner: IRunner) -> None:
        if self._is_over and not math.isfinite(runner.loader_metrics.get(self.metric_key, 0.0)):
            del runner.loader_metrics[self.metric_key]  # divergence is expected

    def on_epoch_end(self, runner: IRunner) -> None:
        if self._is_over:
            self._set_lrs(runner, 1.0)
            runner.need_early_stop = True

    def on_stage_end(self, runner: IRunner) -> None:
        if not self._is_over:
            self._set_lrs(runner, 1.0)
            logger.warning("the stage ended after %d of LRFinder's %d batches", len(self.lrs), self._num_steps)
        self._own_lrs = []

    def on_exception(self, runner: IRunner) -> None:
        if self._own_lrs:
            self._set_lrs(runner, 1.0)
        self._own_lrs = []

    def _groups(self, runner: IRunner) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = as_dict(runner.optimizer)[self.optimizer_key or ""].param_groups
        return groups

    def _factor(self, step: int) -> float:
        """Return the ratio of the rate of step number `step`, counted from 0, to the first rate."""
        part, full = step / (self._num_steps - 1), self.final_lr / self._own_lrs[0]
        return float(full**part) if self.scale == "log" else 1 + (full - 1) * part

    def _set_lrs(self, runner: IRunner, factor: float) -> None:
        for group, lr in zip(self._groups(runner), self._own_lrs, strict=True):
            set_lr(group, lr * factor)

    def _note(self, runner: IRunner) -> None:
        if self.metric_key not in runner.batch_metrics:
            raise UnknownKeyError(
                f"LRFinder reads metric {self.metric_key!r}; the batch has {sorted(runner.batch_metrics)}"
            )
        loss = torch.as_tensor(runner.batch_metrics[self.metric_key], device=runner.engine.device).detach().float()
        # Every rank must enter. This synchronizes, but a sweep is short and must end when the loss diverges.
        self.losses.append(runner.engine.reduce(loss, "mean").item())
        self.lrs.append(self._own_lrs[0] * self._factor(len(self.lrs)))
        self._mean = _PAST * self._mean + (1 - _PAST) * self.losses[-1]
        self.smoothed_losses.append(self._mean / (1 - _PAST ** len(self.losses)))

    @property
    def _is_over(self) -> bool:
        if not self.losses:
            return False
        lowest = min(self.smoothed_losses)  # a multiple of a negative loss is meaningless
        has_diverged = lowest > 0 and self.smoothed_losses[-1] > _DIVERGED * lowest
        return has_diverged or not math.isfinite(self.losses[-1]) or len(self.losses) == self._num_steps

    def state_dict(self) -> StateDict:
        """Return the state to resume from within a sweep."""
        return {
            "lrs": list(self.lrs), "losses": list(self.losses), "smoothed_losses": list(self.smoothed_losses),
            "own_lrs": list(self._own_lrs), "mean": self._mean,
        }  # fmt: skip

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.lrs, self.losses, self.smoothed_losses = (list(state[key]) for key in ("lrs", "losses", "smoothed_losses"))
        self._own_lrs, self._mean = list(state["own_lrs"]), state["mean"]
