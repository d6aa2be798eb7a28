"""Scaling of the learning rate for the larger effective batch of several processes."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from torch.optim import Optimizer

from runnerkit.callback import Callback, CallbackOrder, innermost, outermost
from runnerkit.errors import check_component
from runnerkit.support.arguments import check_integers, check_strings
from runnerkit.types import StateDict, as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["LRScaleCallback"]


class LRScaleCallback(Callback):
    """Multiply the learning rate of every step by the number of processes, or by its square root.

    With N processes, each step uses N times as many samples, and an epoch has N times fewer steps. "linear" keeps the
    sum of an epoch's steps, which suits SGD (Goyal et al. 2017, arXiv:1706.02677); "sqrt" keeps the variance of a step,
    which suits Adam (Malladi et al. 2022, arXiv:2205.10287). Without this callback, nothing is scaled.

    The factor applies only while the optimizer steps. It thus works with any scheduler, checkpoints hold the unscaled
    rate, and a run resumed on another number of processes uses that number. The logged rates are scaled.

    Args:
        rule: "linear" or "sqrt".
        warmup_steps: number of steps in which the factor grows linearly from 1 to its full value.
        optimizer_key: which optimizer, if the runner has several; None scales all.

    >>> LRScaleCallback("sqrt").factor(world_size=4, step=0)
    2.0
    >>> [LRScaleCallback("linear", warmup_steps=2).factor(world_size=4, step=step) for step in range(4)]
    [1.0, 2.5, 4.0, 4.0]
    """

    shapes_training = True

    def __init__(
        self, rule: Literal["linear", "sqrt"] = "linear", warmup_steps: int = 0, optimizer_key: str | None = None
    ) -> None:
        # After SchedulerCallback: torch calls hooks in the order in which they were added, and a scheduler that steps
        # between steps has to see the true rate.
        super().__init__(order=CallbackOrder.Scheduler + 1)
        if rule not in ("linear", "sqrt"):
            raise ValueError(
                f"LRScaleCallback: lr_scale must be 'linear' or 'sqrt', got {rule!r}; None does not scale the "
                "learning rate"
            )
        check_integers(self, least=0, warmup_steps=warmup_steps)
        check_strings(self, or_none=True, optimizer_key=optimizer_key)
        self.rule = rule
        self.warmup_steps = warmup_steps
        self.optimizer_key = optimizer_key
        self.num_steps: dict[str, int] = {}
        self._hooks: list[Any] = []
        self._unscaled: dict[str, list[Any]] = {}

    def factor(self, *, world_size: int, step: int) -> float:
        """Return the factor of step number `step`, counted from 0."""
        full = float(world_size) if self.rule == "linear" else math.sqrt(world_size)
        return 1.0 + (full - 1.0) * (min(1.0, step / self.warmup_steps) if self.warmup_steps else 1.0)

    def on_stage_start(self, runner: IRunner) -> None:
        self.num_steps, self._unscaled = {}, {}
        for key in as_dict(runner.optimizer):
            if self.optimizer_key in (None, key):
                self._refuse_a_second(runner, key)
                self.num_steps[key] = 0
        if not self.num_steps:
            check_component(self, "optimizer", self.optimizer_key, as_dict(runner.optimizer))

    def on_loader_start(self, runner: IRunner) -> None:
        self.on_stage_end(runner)  # a scheduler that was replaced has added hooks
        for key, optimizer in as_dict(runner.optimizer).items():
            if key in self.num_steps:
                self._hook(key, optimizer, runner)

    def _refuse_a_second(self, runner: IRunner, key: str) -> None:
        scaling = [innermost(each) for each in runner.callbacks.values()]
        others = [each for each in scaling if isinstance(each, LRScaleCallback) and each is not self]
        if any(each.optimizer_key in (None, key) for each in others):
            raise ValueError(
                "two LRScaleCallbacks scale the same optimizer; pass either one of them or train(lr_scale=...)"
            )

    def _hook(self, key: str, optimizer: Optimizer, runner: IRunner) -> None:
        world_size, factors = runner.engine.data_parallel.num_processes, runner.current_run.stage.rate_factors
        factors[key] = self.factor(world_size=world_size, step=max(0, self.num_steps[key] - 1))  # of the last step

        wrapper = outermost(self, runner.callbacks.values())

        def scale(*_: Any) -> None:
            if key in self._unscaled:  # a nested optimizer calls the hooks again
                return
            if not wrapper.acts_in_loader(runner):
                factors[key] = 1.0
                return
            self._unscaled[key] = [group["lr"] for group in optimizer.param_groups]
            factors[key] = self.factor(world_size=world_size, step=self.num_steps[key])
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * factors[key]

        def restore(*_: Any) -> None:
            if key not in self._unscaled:
                return
            for group, lr in zip(optimizer.param_groups, self._unscaled.pop(key), strict=True):
                group["lr"] = lr
            self.num_steps[key] += 1

        self._hooks += [optimizer.register_step_pre_hook(scale), optimizer.register_step_post_hook(restore)]

    def on_stage_end(self, runner: IRunner) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    on_exception = on_stage_end

    def state_dict(self) -> StateDict:
        """Return the number of steps of each optimizer, for the warmup."""
        return {"num_steps": dict(self.num_steps)}

    def load_state_dict(self, state: StateDict) -> None:
        """Restore the result of :meth:`state_dict`."""
        self.num_steps = dict(state["num_steps"])
