"""The norm of gradients, of all together and of each parameter, as they are before clipping."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from runnerkit.arguments import check_strings
from runnerkit.callback import Callback, CallbackOrder, innermost
from runnerkit.callbacks.backward import BackwardCallback
from runnerkit.callbacks.gradients import gradient_norm, whole
from runnerkit.callbacks.optimizer import OptimizerCallback
from runnerkit.types import as_dict
from runnerkit.unknown_key import UnknownKeyError

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class GradNormCallback(Callback):
    """Log the Euclidean norm of the gradients that a step is made of: unscaled, averaged over accumulated batches and
    over processes, not clipped yet.

    It is in `batch_metrics` of the batch that a step is made with, as "gradient_norm", or "gradient_norm_KEY" of the
    optimizer of that key; the loader's value is their mean. No device is waited for. A step that the gradient scaler
    skips has an infinite one. Who steps by hand in `handle_batch` reads ``torch.nn.utils.get_total_norm`` there.

    Args:
        per_parameter: log each parameter's too, as "gradient_norm/NAME".
        optimizer_key: which optimizer, if the runner has several.

    >>> GradNormCallback().key
    'gradient_norm'
    """

    def __init__(self, *, per_parameter: bool = False, optimizer_key: str | None = None) -> None:
        super().__init__(order=CallbackOrder.Optimizer + 1)
        check_strings(self, or_none=True, optimizer_key=optimizer_key)
        self.per_parameter = per_parameter
        self.optimizer_key = optimizer_key
        self.key = f"gradient_norm_{optimizer_key}" if optimizer_key else "gradient_norm"
        self._source: BackwardCallback | OptimizerCallback | None = (
            None  # who has the gradients before they are clipped
        )
        self._names: dict[int, str] = {}
        self._norms: dict[str, Tensor] = {}

    def on_stage_start(self, runner: IRunner) -> None:
        callbacks = [innermost(each) for each in runner.callbacks.values()]
        steppers = [
            each
            for each in callbacks
            if isinstance(each, OptimizerCallback) and (each.optimizer_key or "") == (self.optimizer_key or "")
        ]
        if not steppers:
            raise UnknownKeyError(
                f"GradNormCallback reads gradients where OptimizerCallback({self.optimizer_key!r}) steps on them, and "
                f"there is none; the runner has the optimizers {sorted(as_dict(runner.optimizer))}"
            )
        clippers = [
            each
            for each in callbacks
            if isinstance(each, BackwardCallback) and each.grad_clip_fn and each.metric_key == steppers[0].metric_key
        ]
        self._source = (clippers or steppers)[0]
        self._names = {
            id(parameter): f"{key}.{name}".lstrip(".")
            for key, model in as_dict(runner.model).items()
            for name, parameter in runner.engine.unwrap(model).named_parameters()
        }

    def on_loader_start(self, runner: IRunner) -> None:
        if runner.is_train_loader and self._source is not None:
            self._source.gradient_readers.append(self._read)

    def on_batch_end(self, runner: IRunner) -> None:
        if runner.is_train_loader and self._norms:
            runner.batch_metrics.update(self._norms)
            self._norms = {}

    def on_loader_end(self, runner: IRunner) -> None:
        if runner.is_train_loader:
            self._stop()

    def on_stage_end(self, runner: IRunner) -> None:
        self._stop()
        self._source = None

    def on_exception(self, runner: IRunner) -> None:
        self.on_stage_end(runner)

    def _stop(self) -> None:
        if self._source is not None and self._read in self._source.gradient_readers:
            self._source.gradient_readers.remove(self._read)
        self._norms = {}

    def _read(self, parameters: list[Tensor]) -> None:
        held = [each for each in parameters if each.grad is not None]
        self._norms = {self.key: gradient_norm(held)}
        if not self.per_parameter:
            return
        unknown = [each for each in held if id(each) not in self._names]
        if unknown:
            raise ValueError(
                f"per_parameter=True names parameters of the model, and the optimizer holds {len(unknown)} copies of "
                "its own (Apex's in float32, say): leave it out, or use amp=True"
            )
        norms = torch._foreach_norm([each.grad for each in held if each.grad is not None])
        for parameter, norm in zip(held, norms, strict=True):
            self._norms[f"{self.key}/{self._names[id(parameter)]}"] = whole(norm)
