"""What is trained: a table of the model's layers, with the first batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerkit import components
from runnerkit.arguments import check_integers
from runnerkit.callback import Callback, CallbackNode, CallbackOrder
from runnerkit.scratch_runner import scratch_copy
from runnerkit.types import as_dict, like

if TYPE_CHECKING:
    from runnerkit.model_summary import Models
    from runnerkit.runner import IRunner


class ModelSummaryCallback(Callback):
    """Log parameters, output shapes and FLOPs of the model's layers as text, once, before the first batch is run.

    Shapes are traced through the runner's ``predict_batch``, on copies that hold no values: nothing is computed, and
    the run goes on as without it. A runner that has none, or whose model cannot be traced, gets parameters only.

    Args:
        depth: levels of modules to show, >= 1.

    >>> ModelSummaryCallback().depth
    2
    """

    shapes_training = True  # an evaluation does not tell it again

    def __init__(self, depth: int = 2) -> None:
        # Last: the batch is what other callbacks made of it.
        super().__init__(order=CallbackOrder.External, node=CallbackNode.Master)
        check_integers(self, depth=depth)
        self.depth = depth
        self._is_told = False

    def listens_to(self, event: str) -> bool:
        return super().listens_to(event) and not (self._is_told and event == "on_batch_start")

    def on_experiment_start(self, runner: IRunner) -> None:
        self._is_told = False

    def on_batch_start(self, runner: IRunner) -> None:
        from runnerkit.model_summary import summary_of, without_values

        if self._is_told or runner.epoch_step == 0:
            return  # the one batch that is evaluated before training, to see which metrics there are
        self._is_told = True
        # From now on steps pay no call.
        runner._listeners = components.bind_listeners(runner, runner.callbacks.values())
        unwrapped = {key: runner.engine.unwrap(each) for key, each in as_dict(runner.model).items()}

        def predict(copies: Models) -> object:
            scratch = scratch_copy(runner, callbacks=())
            scratch.model = like(runner.model, copies)
            return scratch.predict_batch(without_values(runner.batch))  # type: ignore[attr-defined]  # Runner has it

        text = str(summary_of(like(runner.model, unwrapped), predict, depth=self.depth))
        runner.log_text("model", text)
