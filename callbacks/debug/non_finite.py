"""Detection of the first NaN of a run and the module that produced it."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.callbacks.debug.parts.bad_module import find_origin
from runnerkit.models.parameters import names_of_parameters
from runnerkit.seeding.generators import rng_state
from runnerkit.steps.sparse_gradients import values_of
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["NonFiniteCallback"]


class NonFiniteCallback(Callback):
    """Raise an error when a metric of a batch or a gradient is NaN or infinite, before the optimizer steps on it.

    To name the first module, in forward order, with a non-finite output, the batch runs through the model again with
    the same random numbers. Use it to debug a run that is known to fail: it synchronizes with the device in each batch.
    With float16, infinities are expected and their steps are skipped, so only a NaN in a metric raises.

    >>> NonFiniteCallback().order < CallbackOrder.Backward
    True
    """

    def __init__(self) -> None:
        super().__init__(order=CallbackOrder.Backward - 1)
        self._batch: Any = None
        self._rng: dict[str, Any] = {}
        self._hooks: list[Any] = []

    def on_stage_start(self, runner: IRunner) -> None:
        for optimizer in as_dict(runner.optimizer).values():
            hook = partial(_check_gradients, runner)
            self._hooks.append(optimizer.register_step_pre_hook(hook))

    def on_batch_start(self, runner: IRunner) -> None:
        self._batch, self._rng = runner.batch, rng_state()

    def on_batch_end(self, runner: IRunner) -> None:
        may_be_infinite = runner.engine.precision.skips_steps
        for key, value in runner.batch_metrics.items():
            number = float(value.detach()) if isinstance(value, Tensor) and value.numel() == 1 else value
            if not isinstance(number, float) or math.isfinite(number) or (math.isinf(number) and may_be_infinite):
                continue
            origin = find_origin(runner, self._batch, rng=self._rng, of_nan=math.isnan(number))
            raise FloatingPointError(f"batch_metrics[{key!r}] is {number} {_place(runner)}: {origin}")

    def on_stage_end(self, runner: IRunner) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._batch = None

    on_exception = on_stage_end


def _check_gradients(runner: IRunner, optimizer: Optimizer, *_: Any) -> None:
    held = [each for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    if not held or bool(torch.stack([values_of(each.grad).isfinite().all() for each in held]).all()):
        return
    bad = [each for each in held if not bool(values_of(each.grad).isfinite().all())]
    models = as_dict(runner.current_run.stage.training_model)  # under FSDP2 a sharded copy trains
    names = names_of_parameters({key: runner.engine.trained_parameters(each) for key, each in models.items()})
    raise FloatingPointError(
        f"the gradient of {names.get(id(bad[-1]), 'a parameter')!r} is not finite {_place(runner)}, although the "
        f"metrics are; it is the last in the model of {len(bad)} such gradients out of {len(held)}. "
        "detect_anomaly=True names the operation"
    )


def _place(runner: IRunner) -> str:
    return (
        f"in batch {runner.loader_batch_step} of loader {runner.loader_key!r}, epoch {runner.epoch_step}, step "
        f"{runner.batch_step}, rank {runner.engine.rank}"
    )
