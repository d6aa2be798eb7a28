"""A target network that follows another one, as in reinforcement learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.errors import UnknownKeyError
from runnerkit.models.parameters import soft_update
from runnerkit.support.arguments import check_numbers, check_strings
from runnerkit.support.deprecation import Renamed, accepts_old_names
from runnerkit.types import models_by_key

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["SoftUpdateCallaback", "SoftUpdateCallback"]

_SCOPES = ("on_batch_start", "on_batch_end", "on_epoch_start", "on_epoch_end")


class SoftUpdateCallback(Callback):
    """Update target = (1 - tau) * target + tau * source, the parameters of two models, in training.

    Args:
        target_model, source_model: keys of the runner's models, which are a dict or an ``nn.ModuleDict``.
        tau: in [0, 1].
        scope: "on_batch_end", after an optimizer step, "on_batch_start", "on_epoch_start" or "on_epoch_end".

    >>> SoftUpdateCallback("target", "policy", tau=0.01, scope="on_batch_end").tau
    0.01
    """

    shapes_training = True
    changes_weights = True

    @accepts_old_names(Renamed("target_model_key", "target_model"), Renamed("source_model_key", "source_model"))
    def __init__(
        self,
        target_model: str,
        source_model: str,
        tau: float,
        scope: Literal["on_batch_start", "on_batch_end", "on_epoch_start", "on_epoch_end"],
    ) -> None:
        super().__init__(order=CallbackOrder.External)
        check_strings(self, target_model=target_model, source_model=source_model)
        check_numbers(self, tau=tau)
        if not 0 <= tau <= 1:
            raise ValueError(f"SoftUpdateCallback: tau must be in [0, 1], got {tau}")
        if scope not in _SCOPES:
            raise ValueError(f"SoftUpdateCallback: scope must be one of {_SCOPES}, got {scope!r}")
        self.target_model, self.source_model, self.tau, self.scope = target_model, source_model, tau, scope

    def on_stage_start(self, runner: IRunner) -> None:
        models = models_by_key(runner.model)
        missing = [key for key in (self.target_model, self.source_model) if key not in models]
        if missing:
            raise UnknownKeyError(f"SoftUpdateCallback needs models {missing}; the runner has {sorted(models)}")

    def on_batch_start(self, runner: IRunner) -> None:
        self._update(runner, scope="on_batch_start", is_training=runner.is_train_loader)

    def on_batch_end(self, runner: IRunner) -> None:
        has_stepped = runner.is_train_loader and runner.gradient_step.is_due(runner, 1)  # not after accumulating only
        self._update(runner, scope="on_batch_end", is_training=has_stepped)

    def on_epoch_start(self, runner: IRunner) -> None:
        has_begun = runner.current_run.resume_point.is_within_epoch  # before an interruption
        self._update(runner, scope="on_epoch_start", is_training=not has_begun)

    def on_epoch_end(self, runner: IRunner) -> None:
        self._update(runner, scope="on_epoch_end", is_training=True)

    def _update(self, runner: IRunner, *, scope: str, is_training: bool) -> None:
        if is_training and scope == self.scope:
            soft_update(runner.model[self.target_model], runner.model[self.source_model], self.tau)


SoftUpdateCallaback = SoftUpdateCallback  # the name in Catalyst
