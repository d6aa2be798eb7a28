"""A warning if the first training loader of a stage ends without a step of an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from runnerkit.callback import IOptimizerCallback, innermost
from runnerkit.precision import Precision
from runnerkit.types import as_dict, parameters_of

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


class StepWatch:
    """A hook that notices the first step of any torch optimizer in this process; after that it costs nothing.

    A stage has one, as ``stage.step_watch``, until its first complete training loader has ended.

    Args:
        awaited: optimizers by key, each of which has to step; by default any of the process does.

    >>> import torch
    >>> watch = StepWatch()
    >>> watch.open()
    >>> torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
    >>> watch.close()
    >>> watch.has_stepped
    True
    """

    def __init__(self, awaited: Mapping[str, Any] | None = None) -> None:
        self.awaited = dict(awaited or {})
        self.has_stepped = False
        self._hook: RemovableHandle | None = None

    def open(self) -> None:
        """Start to watch all optimizers of this process."""
        self._hook = register_optimizer_step_post_hook(self._note)

    def _note(self, optimizer: Any, *_: Any) -> None:
        if self.awaited:
            own = {*parameters_of(optimizer)}  # of a wrapper, those of the optimizer inside it
            self.awaited = {key: each for key, each in self.awaited.items() if own.isdisjoint(parameters_of(each))}
        self.has_stepped = not self.awaited

    def close(self) -> None:
        """Stop watching; safe to call twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    @classmethod
    def of_stage(cls, runner: IRunner) -> Self | None:
        """Return a watch for a stage in which the user's code has to call the optimizer, otherwise None.

        An OptimizerCallback steps, accumulates or raises; optimizers beside those of the callbacks are awaited.
        Optimizers from outside torch do not run hooks.
        """
        optimizers = as_dict(runner.optimizer)
        steppers = [each for each in map(innermost, runner.callbacks.values()) if isinstance(each, IOptimizerCallback)]
        # One without a key, of the user's class, may step all of them.
        keys = {getattr(each, "optimizer_key", key) or "" for each in steppers for key in optimizers}
        left = {key: each for key, each in optimizers.items() if key not in keys} if steppers else {}
        are_torchs = all(isinstance(each, Optimizer) for each in optimizers.values())
        is_to_train = runner.optimizer is not None or runner.criterion is not None
        return cls(left) if is_to_train and are_torchs and (left or not steppers) else None

    def start_pass(self, runner: IRunner) -> None:
        """Start to watch in a complete training loader, not in the rest of an interrupted one."""
        if not runner.loader_pass.num_skipped:
            self.open()
            runner.current_run.stage.listeners["on_step_end"] += (self._close_after_step,)

    def _close_after_step(self, runner: IRunner) -> None:
        """Remove the hook after the first step, on ``on_step_end``: torch cannot remove a hook while it runs."""
        stage = runner.current_run.stage
        if stage.step_watch is None or self.has_stepped:
            self.leave(runner)
            stage.listeners.remove("on_step_end", self._close_after_step)

    def end_pass(self, runner: IRunner) -> None:
        """Warn, once per stage, if a complete training loader ended without a step."""
        if runner.loader_pass.num_skipped:
            return
        self.leave(runner)
        may_have_skipped = _may_have_skipped(runner.optimizer, runner.engine.precision)
        if not self.has_stepped and runner.engine.is_main_process and not may_have_skipped:
            self._warn(runner)

    def leave(self, runner: IRunner) -> None:
        """Stop watching the stage, even after an error."""
        self.close()
        runner.current_run.stage.step_watch = None

    def _warn(self, runner: IRunner) -> None:
        where = f"in the first pass over loader {runner.loader_key!r} ({runner.loader_batch_step} batches)"
        if runner.optimizer is None:
            logger.warning(
                "there is a criterion but no optimizer, and no other optimizer stepped %s, so nothing was trained: "
                "pass optimizer= or override get_optimizer; to evaluate, call evaluate_loader", where,
            )  # fmt: skip
            return
        kinds = {key: type(each).__name__ for key, each in (self.awaited or as_dict(runner.optimizer)).items()}
        names = ", ".join(f"{key!r} ({kind})" if key else kind for key, kind in kinds.items())
        if self.awaited:
            logger.warning(
                "optimizer %s did not step %s, so its parameters were not trained: add OptimizerCallback(optimizer_key="
                "%r), step it in handle_batch, or leave it out", names, where, next(iter(kinds)),
            )  # fmt: skip
            return
        logger.warning(
            "optimizer %s did not step %s, so nothing was trained: put the loss, a tensor, into "
            "self.batch_metrics['loss'] and pass callbacks=[BackwardCallback('loss'), OptimizerCallback('loss')], or "
            "call self.learn(loss) in handle_batch. Ignore this if your optimizer steps after more batches than that",
            names, where,
        )  # fmt: skip


def _may_have_skipped(optimizers: Any, precision: Precision) -> bool:
    """Return whether a gradient scaler may have skipped the steps, as it does with the first ones of a run."""
    groups = [group for each in as_dict(optimizers).values() for group in each.param_groups]
    has_gradients = any(parameter.grad is not None for group in groups for parameter in group["params"])
    return precision.skips_steps and has_gradients
