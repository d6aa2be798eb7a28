"""A run that only evaluates one loader, and its hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from runnerkit.before_training import check_one_loader
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
from runnerkit.types import Criterion, Metrics, Model

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)


def evaluate(
    runner: IRunner,
    loader: Iterable[Any],
    *,
    model: Model | None,
    criterion: Criterion | None,
    engine: IEngine | None,
    callbacks: dict[str, ICallback] | None,
    shown_by: dict[str, ICallback],
    seed: int,
) -> Metrics:
    """Return the loader's metrics; `runner` keeps what it had.

    Args:
        shown_by: callbacks that come beside the others, whichever these are.
        loader, model, criterion, engine, callbacks, seed: those of the runner's `evaluate_loader`.
    """
    check_one_loader(loader, reader="evaluate_loader")
    before = dict(vars(runner))
    runner.model = model if model is not None else runner.model
    runner._seed, runner.valid_every_steps, runner._resume, runner._continues = seed, None, None, False
    runner._evaluation = EvaluationHooks(runner, loader, criterion, engine, callbacks, shown_by)
    try:
        metrics = dict(runner.run().loader_metrics)
        if not metrics and runner.engine.is_main_process:
            logger.warning(
                "evaluate_loader found no metrics: neither a criterion nor a callback nor handle_batch gave any; pass "
                "criterion=, or for example callbacks=[AccuracyCallback('logits', 'targets')]"
            )
        return metrics
    finally:
        vars(runner).clear()
        vars(runner).update(before)


class EvaluationHooks:
    """Stand in for a runner's own: whatever it overrides, nothing is trained or written.

    Args:
        runner: gives model, criterion and callbacks.
        loader: what is evaluated, as "valid".
        criterion: None is the runner's.
        engine: None is the runner's.
        callbacks: beside the runner's criterion; None is all of the runner's, but those that train or save.
        shown_by: beside all these.
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
        return model if model is not None else self.runner.get_model(stage)

    def get_criterion(self, stage: str) -> Criterion | None:
        return self.criterion if self.criterion is not None else self.runner.get_criterion(stage)

    def get_optimizer(self, stage: str, model: Any) -> None:
        return None

    def get_scheduler(self, stage: str, optimizer: Any) -> None:
        return None

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        training = (IBackwardCallback, IOptimizerCallback, ISchedulerCallback, ICheckpointCallback)
        of_runner = {
            key: each
            for key, each in self.runner.get_callbacks(stage).items()
            if not isinstance(innermost(each), training)
            and not each.requires
            and not innermost(each).shapes_training  # a check's three batches are not the loader
        }
        if self.callbacks is None:
            return of_runner | self.shown_by
        criteria = {key: each for key, each in of_runner.items() if isinstance(innermost(each), ICriterionCallback)}
        return criteria | self.callbacks | self.shown_by
