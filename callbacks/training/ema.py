"""An exponential moving average of the weights, updated after each optimizer step."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch.optim.swa_utils import get_ema_multi_avg_fn

from runnerkit.callbacks.training.parts.averaged_weights import AverageFn
from runnerkit.callbacks.training.parts.weight_average import WeightAverageCallback
from runnerkit.support.arguments import check_numbers
from runnerkit.types import as_dict, parameters_of

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["EMACallback"]


class EMACallback(WeightAverageCallback):
    """Update average = decay * average + (1 - decay) * weights after each step; the stage ends with the average as its
    model.

    The average starts with the weights after the first step. Batches that only accumulate gradients and steps that the
    gradient scaler skips do not count; several steps within a batch count as one.

    Args:
        decay: in [0, 1); the average covers about 1 / (1 - decay) steps.
        model_key: which model, if the runner has several; None averages each.
        validate: evaluate with the average; the best checkpoint and model loaded from checkpoints are then the average.
        use_buffers: also average buffers such as batch norm statistics; otherwise they are those of training.

    >>> EMACallback(decay=0.99).decay
    0.99
    """

    def __init__(
        self,
        decay: float = 0.999,
        *,
        model_key: str | None = None,
        validate: bool = True,
        use_buffers: bool = False,
    ) -> None:
        super().__init__(model_key=model_key, validate=validate, use_buffers=use_buffers)
        check_numbers(self, decay=decay)
        if not 0 <= decay < 1:
            raise ValueError(
                f"EMACallback: decay must be in [0, 1), got {decay}; 0.999 averages over about 1,000 steps"
            )
        self.decay = decay
        self._stepped: set[str] = set()  # models whose optimizer stepped since the last batch's end
        self._hooks = ExitStack()

    def average_fn(self) -> AverageFn:
        return cast(AverageFn, get_ema_multi_avg_fn(self.decay))

    def on_stage_start(self, runner: IRunner) -> None:
        super().on_stage_start(runner)
        self._stepped.clear()
        for key, average in self.averages.items():
            own, known = set(average.module.parameters()), as_dict(runner.optimizer).values()
            optimizers = [each for each in known if not own.isdisjoint(parameters_of(each))]
            if not optimizers:
                raise ValueError(
                    f"EMACallback counts steps, but no optimizer of the runner has parameters of model {key!r}; pass "
                    "the key of a trained model as model_key"
                )
            for each in optimizers:
                # A hook on the optimizer also sees steps made by handle_batch, and does not see skipped ones.
                self._hooks.callback(each.register_step_post_hook(partial(self._note_step, key)).remove)

    def _note_step(self, key: str, *_: Any) -> None:
        self._stepped.add(key)

    def on_batch_end(self, runner: IRunner) -> None:
        if self._stepped:
            self._update()

    def on_loader_end(self, runner: IRunner) -> None:
        self._update()  # a loader's last step may follow its last batch

    def _update(self) -> None:
        for key in self._stepped:
            self.averages[key].update()
        self._stepped.clear()

    def on_exception(self, runner: IRunner) -> None:
        self._hooks.close()
        super().on_exception(runner)

    def on_stage_end(self, runner: IRunner) -> None:
        self._hooks.close()
        super().on_stage_end(runner)
