"""Evaluation of one loader without training."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runnerkit.callback import (
    IBackwardCallback,
    ICallback,
    ICheckpointCallback,
    ICriterionCallback,
    IOptimizerCallback,
    ISchedulerCallback,
    innermost,
)
from runnerkit.engine import IEngine
from runnerkit.logger import ILogger
from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.checks import check_one_loader
from runnerkit.loop.hooks import call_hook
from runnerkit.types import Criterion, Metrics, Model

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)


@contextmanager
def unchanged(runner: IRunner) -> Iterator[None]:
    """Give the runner back all attributes that it had, user-defined ones too, after the body or its error."""
    kept = dict(vars(runner))
    try:
        yield
    finally:
        vars(runner).clear()
        vars(runner).update(kept)


def evaluate(runner: IRunner) -> Metrics:
    """Run `runner`, whose hooks are :class:`EvaluationHooks`, and return its loader's metrics."""
    metrics = dict(runner.run().loader_metrics)
    if not metrics and runner.engine.is_main_process:
        logger.warning(
            "evaluate_loader found no metrics: there is no criterion, no callback computes any, and handle_batch sets "
            "none; pass criterion=, or for example callbacks=[AccuracyCallback('logits', 'targets')]"
        )
    return metrics


class EvaluationHooks(ProcessState):
    """Hooks that replace those of a runner, so that nothing is trained or written.

    Args:
        runner: provides the model, the criterion and callbacks.
        loader: the loader to evaluate, under the key "valid".
        criterion: None uses the runner's.
        engine: None uses the runner's.
        callbacks: in addition to the runner's criterion; None uses all callbacks that neither train nor save.
        shown_by: callbacks that show progress, in addition to all others.
    """

    stages = ("evaluate",)

    def __init__(
        self,
        runner: IRunner,
        loader: Iterable[Any],
        criterion: Criterion | None,
        engine: IEngine | None,
        callbacks: dict[str, ICallback] | None,
        shown_by: dict[str, ICallback],
    ) -> None:
        check_one_loader(loader, reader="evaluate_loader")
        self.runner = runner
        self.loader = loader
        self.criterion = criterion
        self.engine = engine
        self.callbacks = callbacks
        self.shown_by = shown_by

    def get_engine(self) -> IEngine:
        return self.engine or self.runner.get_engine()

    def get_stage_len(self, stage: str) -> int:
        return 1

    def get_loggers(self) -> dict[str, ILogger]:
        return {}

    def get_loaders(self, stage: str) -> dict[str, Any]:
        return {"valid": self.loader}

    def get_model(self, stage: str) -> Model:
        model: Model | None = self.runner.model
        return model if model is not None else call_hook(self.runner.get_model, stage=stage)

    def get_criterion(self, stage: str) -> Criterion | None:
        return self.criterion if self.criterion is not None else call_hook(self.runner.get_criterion, stage=stage)

    def get_optimizer(self, stage: str, model: Any) -> None:
        return None

    def get_scheduler(self, stage: str, optimizer: Any) -> None:
        return None

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        training = (IBackwardCallback, IOptimizerCallback, ISchedulerCallback, ICheckpointCallback)
        of_runner = {
            key: each
            for key, each in call_hook(self.runner.get_callbacks, stage=stage).items()
            if not isinstance(innermost(each), training)
            and not each.requires
            and not innermost(each).shapes_training  # they would evaluate a part of the loader
        }
        if self.callbacks is None:
            return of_runner | self.shown_by
        criteria = {key: each for key, each in of_runner.items() if isinstance(innermost(each), ICriterionCallback)}
        return criteria | self.callbacks | self.shown_by
