"""A table of the model's layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerkit.callback import Callback, CallbackNode, CallbackOrder
from runnerkit.passes.scratch_runner import scratch_copy
from runnerkit.support.arguments import check_integers
from runnerkit.types import StateDict, as_dict, like

if TYPE_CHECKING:
    from runnerkit.models.layer_table import Models
    from runnerkit.runner import IRunner

__all__ = ["ModelSummaryCallback"]


class ModelSummaryCallback(Callback):
    """Log parameters, output shapes and FLOPs of the model's layers as text, once, before the first batch.

    Shapes are traced through the runner's ``predict_batch`` on meta tensors: nothing is computed, and the run does not
    change. Without ``predict_batch``, or if the model cannot be traced, the table has parameters only.

    Args:
        depth: number of module levels to show, >= 1.

    >>> ModelSummaryCallback().depth
    2
    """

    shapes_training = True  # not shown again in an evaluation

    def __init__(self, depth: int = 2) -> None:
        # After the library's callbacks, which may change the batch.
        super().__init__(order=CallbackOrder.External, node=CallbackNode.Master)
        check_integers(self, depth=depth)
        self.depth = depth
        self._is_told = self._is_logged = False

    def listens_to(self, event: str) -> bool:
        return super().listens_to(event) and not (self._is_told and event == "on_batch_start")

    def on_experiment_start(self, runner: IRunner) -> None:
        self._is_told = False

    def on_stage_start(self, runner: IRunner) -> None:
        self._is_logged = runner.current_run.resume_point.has_logged(runner.stage_key)

    def on_batch_start(self, runner: IRunner) -> None:
        from runnerkit.models.layer_table import summary_of, without_values

        if runner.epoch_step == 0:
            return  # the batch evaluated before training, to find the metrics
        runner.current_run.stage.listeners.remove("on_batch_start", self.on_batch_start)
        if self._is_told:
            return
        self._is_told = True
        unwrapped = {key: runner.engine.unwrap(each) for key, each in as_dict(runner.model).items()}

        def predict(copies: Models) -> object:
            scratch = scratch_copy(runner, callbacks=())
            scratch.model = like(runner.model, copies)
            return scratch.predict_batch(without_values(runner.batch))  # type: ignore[attr-defined]  # Runner has it

        text = str(summary_of(like(runner.model, unwrapped), predict, depth=self.depth))
        runner.log_text("model", text)

    def state_dict(self) -> StateDict:
        return {"is_told": True} if self._is_told else {}

    def load_state_dict(self, state: StateDict) -> None:
        self._is_told = self._is_logged and state.get("is_told", False)
