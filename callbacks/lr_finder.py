"""A sweep of the learning rate: where the loss falls, and where it diverges."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from runnerkit.arguments import check_integers, check_numbers, check_strings
from runnerkit.callback import Callback, CallbackOrder, innermost
from runnerkit.curves.plot import finish_axes, new_figure, save
from runnerkit.types import StateDict, as_dict
from runnerkit.unknown_key import UnknownKeyError
from runnerkit.warmup import set_lr

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

_PAST = 0.9  # its weight in the smoothed loss
_DIVERGED = 4.0  # times the lowest smoothed loss


class LRFinder(Callback):
    """Raise the learning rate with each batch, from the optimizer's own to `final_lr`, and note the losses; then the
    stage ends.

    The range test of Smith 2015 (arXiv:1506.01186). It ends early when the loss diverges: when it is not finite, or,
    smoothed, more than four times its lowest (if that is above zero). Then the optimizer gets its own rates back, and
    nothing else is put back: weights, batch norm's statistics and momenta are what the sweep made of them, so train a
    model made anew. Loaders that come after the sweep see one batch.

    Args:
        final_lr: of the last batch; larger than the optimizer's own.
        scale: "log": the rate grows by the same factor each time; "linear": by the same difference.
        num_steps: batches, >= 2; None is one pass through the training loader.
        optimizer_key: which optimizer, if the runner has several. Of its groups, the others keep their ratio to the
            first, whose rates are noted.
        metric_key: of the loss.

    Attributes:
        lrs, losses: of each batch, the loss as the mean over all processes; complete after the run, under DDP too.
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
        # After the loss is made, and before BackwardCallback, which refuses a loader whose mean loss is not finite.
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
        self._mean = 0.0  # from 0 on, so too small at first

    @property
    def suggestion(self) -> float:
        """A tenth of the rate at which the smoothed loss was lowest: beyond that one it no longer fell.

        Raises:
            RuntimeError: nothing was swept yet.
        """
        if not self.smoothed_losses:
            raise RuntimeError("LRFinder suggests a rate after its sweep: pass it to train(callbacks=[...]) first")
        return self.lrs[self.smoothed_losses.index(min(self.smoothed_losses))] / 10

    def plot(self, path: str | Path) -> Path:
        """Draw the losses over the rates, and the suggestion, and save them as a PNG; return where."""
        figure = new_figure(wanted_by="LRFinder.plot")
        axes = figure.add_subplot()
        axes.plot(self.lrs, self.losses, alpha=0.3, label=self.metric_key)
        axes.plot(self.lrs, self.smoothed_losses, color="C0", label="smoothed")
        axes.axvline(self.suggestion, color="C1", linestyle="--", label=f"suggestion {self.suggestion:.2g}")
        axes.set_xscale(self.scale)
        axes.set_xlabel("lr")
        # The last losses are so large that the fall before them would look flat.
        axes.set_ylim(min(self.losses), 2 * self.smoothed_losses[0])
        finish_axes(axes)
        return save(figure, Path(path))

    def on_stage_start(self, runner: IRunner) -> None:
        optimizers = as_dict(runner.optimizer)
        if (self.optimizer_key or "") not in optimizers:
            have = sorted(optimizers) if optimizers else "none"
            raise UnknownKeyError(f"LRFinder wants optimizer {self.optimizer_key!r}; the runner has {have}")
        others = [each for each in map(innermost, runner.callbacks.values()) if isinstance(each, LRFinder)]
        if sum((each.optimizer_key or "") == (self.optimizer_key or "") for each in others) > 1:
            raise ValueError("two LRFinders sweep the rate of one optimizer, and the last one to set it wins: pass one")
        if (self.optimizer_key or "") in as_dict(runner.scheduler):
            raise ValueError("LRFinder sets the learning rate of each batch: leave the scheduler out of its run")
        self.lrs, self.losses, self.smoothed_losses, self._mean = [], [], [], 0.0
        self._own_lrs = [float(group["lr"]) for group in self._groups(runner)]
        if not 0 < self._own_lrs[0] < self.final_lr:
            raise ValueError(
                f"LRFinder begins with the optimizer's lr, which must be between 0 and final_lr={self.final_lr}; it is "
                f"{self._own_lrs[0]}"
            )

    def on_loader_start(self, runner: IRunner) -> None:
        if not runner.is_train_loader or self._is_over:
            return
        num_steps = self.num_steps or runner.loader_batch_len
        if num_steps is None or num_steps < 2:
            raise ValueError(
                f"LRFinder goes once through loader {runner.loader_key!r}, of {num_steps or 'unknown'} length: "
                "pass num_steps, >= 2"
            )
        self._num_steps = num_steps

    def on_batch_start(self, runner: IRunner) -> None:
        if runner.is_train_loader and not self._is_over:
            self._set_lrs(runner, self._factor(len(self.lrs)))

    def on_batch_end(self, runner: IRunner) -> None:
        if runner.is_train_loader and not self._is_over:
            self._note(runner)
        if self._is_over:
            runner.need_early_stop = True  # of this loader only

    def on_loader_end(self, runner: IRunner) -> None:
        if self._is_over and not math.isfinite(runner.loader_metrics.get(self.metric_key, 0.0)):
            del runner.loader_metrics[self.metric_key]  # it diverged, as it was to

    def on_epoch_end(self, runner: IRunner) -> None:
        if self._is_over:
            self._set_lrs(runner, 1.0)
            runner.need_early_stop = True

    def on_stage_end(self, runner: IRunner) -> None:
        if not self._is_over:
            self._set_lrs(runner, 1.0)
            logger.warning("the stage ended after %d of LRFinder's %d batches", len(self.lrs), self._num_steps)

    def _groups(self, runner: IRunner) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = as_dict(runner.optimizer)[self.optimizer_key or ""].param_groups
        return groups

    def _factor(self, step: int) -> float:
        """By how much step number `step`, from 0 on, is made larger than the first."""
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
        loss = runner.batch_metrics[self.metric_key].detach().float()
        # Every rank must enter. It waits for the device: a sweep is short, and must not go on once it diverged.
        self.losses.append(runner.engine.reduce(loss, "mean").item())
        self.lrs.append(self._own_lrs[0] * self._factor(len(self.lrs)))
        self._mean = _PAST * self._mean + (1 - _PAST) * self.losses[-1]
        self.smoothed_losses.append(self._mean / (1 - _PAST ** len(self.losses)))

    @property
    def _is_over(self) -> bool:
        if not self.losses:
            return False
        lowest = min(self.smoothed_losses)  # below zero there is no such multiple
        has_diverged = lowest > 0 and self.smoothed_losses[-1] > _DIVERGED * lowest
        return has_diverged or not math.isfinite(self.losses[-1]) or len(self.losses) == self._num_steps

    def state_dict(self) -> StateDict:
        """State to go on from within a sweep."""
        return {
            "lrs": list(self.lrs), "losses": list(self.losses), "smoothed_losses": list(self.smoothed_losses),
            "own_lrs": list(self._own_lrs), "mean": self._mean,
        }  # fmt: skip

    def load_state_dict(self, state: StateDict) -> None:
        """Take back :meth:`state_dict`."""
        self.lrs, self.losses, self.smoothed_losses = (list(state[key]) for key in ("lrs", "losses", "smoothed_losses"))
        self._own_lrs, self._mean = list(state["own_lrs"]), state["mean"]
