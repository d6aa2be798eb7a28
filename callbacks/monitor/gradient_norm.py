"""Gradient norms before clipping, in total and per parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from runnerkit.callback import Callback, CallbackOrder, innermost
from runnerkit.callbacks.training.backward import BackwardCallback
from runnerkit.callbacks.training.optimizer import OptimizerCallback
from runnerkit.callbacks.training.parts.gradients import gradient_norm, gradient_norms
from runnerkit.errors import UnknownKeyError
from runnerkit.models.parameters import names_of_parameters
from runnerkit.support.arguments import check_strings
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["GradNormCallback"]


class GradNormCallback(Callback):
    """Log the Euclidean norm of each step's gradients: unscaled, averaged over accumulated batches and processes,
    before clipping.

    It is in `batch_metrics` of batches that make a step, as "gradient_norm", or "gradient_norm_KEY" for the optimizer
    of that key; the loader's value is their mean. It does not synchronize. Steps that the gradient scaler skips have
    an infinite norm. If `handle_batch` makes the steps, use ``torch.nn.utils.get_total_norm`` there instead.

    Args:
        per_parameter: also log the norm of each parameter, as "gradient_norm/NAME".
        optimizer_key: which optimizer, if the runner has several.

    >>> GradNormCallback().key
    'gradient_norm'
    """

    shapes_training = True

    def __init__(self, *, per_parameter: bool = False, optimizer_key: str | None = None) -> None:
        super().__init__(order=CallbackOrder.Optimizer + 1)
        check_strings(self, or_none=True, optimizer_key=optimizer_key)
        self.per_parameter = per_parameter
        self.optimizer_key = optimizer_key
        self.key = f"gradient_norm_{optimizer_key}" if optimizer_key else "gradient_norm"
        self._source: BackwardCallback | OptimizerCallback | None = (
            None  # the callback whose gradients are read before it clips them
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
            own = f" for optimizer {self.optimizer_key!r}" if self.optimizer_key else ""
            raise UnknownKeyError(
                f"GradNormCallback reads the gradients of an OptimizerCallback{own}, and the run has none; if "
                "handle_batch makes the steps, log the norm there"
            )
        clippers = [
            each
            for each in callbacks
            if isinstance(each, BackwardCallback) and each.grad_clip_fn and each.metric_key == steppers[0].metric_key
        ]
        self._source = (clippers or steppers)[0]
        models = as_dict(runner.current_run.stage.training_model)  # under FSDP2 a sharded copy trains
        self._names = names_of_parameters({key: runner.engine.trained_parameters(each) for key, each in models.items()})

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

    on_exception = on_stage_end

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
                f"per_parameter=True needs the model's parameters, but the optimizer holds {len(unknown)} copies of "
                "them (such as Apex's float32 copies): leave it out, or use amp=True"
            )
        for parameter, norm in zip(held, gradient_norms(held), strict=True):
            self._norms[f"{self.key}/{self._names[id(parameter)]}"] = norm
