"""The first NaN of a run, and the module it comes from."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.callbacks.bad_module import find_origin
from runnerkit.seeding import rng_state
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class NonFiniteCallback(Callback):
    """Raise in the batch in which a metric, or after it a gradient, is NaN or infinite, before a step is taken on it.

    The error names the first module, in the order of the forward pass, that gave something not finite: the batch goes
    through the model once more, with the same random numbers. For a run that is known to go wrong: each batch is read
    from the device, which then waits. With float16 infinities are normal and steps are skipped, so there only a NaN
    of a metric counts.

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
    if not held or bool(torch.stack([each.grad.isfinite().all() for each in held]).all()):
        return
    bad = [each for each in held if not bool(each.grad.isfinite().all())]
    names = {
        id(parameter): f"{key}.{name}".lstrip(".")
        for key, model in as_dict(runner.model).items()
        for name, parameter in runner.engine.unwrap(model).named_parameters()
    }
    raise FloatingPointError(
        f"the gradient of {names.get(id(bad[-1]), 'a parameter')!r} is not finite {_place(runner)}, though the metrics "
        f"are; it is the last in the model of {len(bad)} such gradients among {len(held)}. detect_anomaly=True names "
        "the operation"
    )


def _place(runner: IRunner) -> str:
    return (
        f"in batch {runner.loader_batch_step} of loader {runner.loader_key!r}, epoch {runner.epoch_step}, step "
        f"{runner.batch_step}, rank {runner.engine.rank}"
    )
