"""A stage that trains nothing is told of after its first training loader."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from runnerkit.callback import IOptimizerCallback, innermost
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)


class StepWatch:
    """Whether an optimizer of torch's steps, the runner's or the user's own; after the first step it costs nothing.

    >>> import torch
    >>> watch = StepWatch()
    >>> watch.open()
    >>> torch.optim.SGD([torch.ones(1, requires_grad=True)]).step()
    >>> watch.close()
    >>> watch.has_stepped
    True
    """

    def __init__(self) -> None:
        self.has_stepped = False
        self._hook: RemovableHandle | None = None

    def open(self) -> None:
        """Begin to watch all optimizers of this process."""
        self._hook = register_optimizer_step_post_hook(self._note)

    def _note(self, *_: Any) -> None:
        self.has_stepped = True

    def close(self) -> None:
        """Watch no more; safe to call twice."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None


def watch_of_stage(runner: IRunner) -> StepWatch | None:
    """Make the watch of a stage in which the user's own code is to step, else None.

    An OptimizerCallback steps, accumulates or raises; optimizers that are not torch's run no hooks.
    """
    has_callback = any(isinstance(innermost(each), IOptimizerCallback) for each in runner.callbacks.values())
    are_torchs = all(isinstance(each, Optimizer) for each in as_dict(runner.optimizer).values())
    is_to_train = runner.optimizer is not None or runner.criterion is not None
    return StepWatch() if is_to_train and are_torchs and not has_callback else None


def enter_loader(runner: IRunner) -> None:
    """Begin to watch in the stage's first training loader that is whole: not in what is left of an interrupted one."""
    if runner._step_watch is not None and not runner._skipped_batches:
        runner._step_watch.open()
        runner._listeners["on_step_end"] += (_look,)


def _look(runner: IRunner) -> None:
    """Listen to ``on_step_end`` until there was a step; in its own hook it could not be removed, torch being at it."""
    watch = runner._step_watch
    if watch is None or watch.has_stepped:
        close(runner)
        others = tuple(each for each in runner._listeners["on_step_end"] if each is not _look)
        runner._listeners["on_step_end"] = others


def leave_loader(runner: IRunner) -> None:
    """Warn, once a stage, if a whole training loader went by without a step."""
    watch = runner._step_watch
    if watch is None or runner._skipped_batches:
        return
    close(runner)
    if watch.has_stepped or not runner.engine.is_main_process or _may_have_skipped(runner):
        return
    where = f"in the first pass over loader {runner.loader_key!r} ({runner.loader_batch_step} batches)"
    if runner.optimizer is None:
        logger.warning(
            "there is a criterion and no optimizer, and none of your own stepped %s, so that nothing was trained: pass "
            "optimizer= or override get_optimizer; to evaluate call evaluate_loader", where,
        )  # fmt: skip
        return
    kinds = {key: type(each).__name__ for key, each in as_dict(runner.optimizer).items()}
    names = ", ".join(f"{key!r} ({kind})" if key else kind for key, kind in kinds.items())
    logger.warning(
        "optimizer %s did not step %s, so that nothing was trained: put the loss, a tensor, into "
        "self.batch_metrics['loss'] and pass callbacks=[BackwardCallback('loss'), OptimizerCallback('loss')], or call "
        "self.engine.backward(loss) and self.engine.step(self.optimizer) in handle_batch. If yours steps after more "
        "batches than these, all is well", names, where,
    )  # fmt: skip


def _may_have_skipped(runner: IRunner) -> bool:
    """Whether a gradient scaler may have skipped the steps, as it does with a run's first: then there are gradients."""
    groups = [group for each in as_dict(runner.optimizer).values() for group in each.param_groups]
    has_gradients = any(parameter.grad is not None for group in groups for parameter in group["params"])
    return runner.engine.precision.skips_steps and has_gradients


def close(runner: IRunner) -> None:
    """Watch no more, whatever happened."""
    if runner._step_watch is not None:
        runner._step_watch.close()
        runner._step_watch = None
