"""Evaluation of one loader without training."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from runnerkit.callback import (
    EVENTS,
    CallbackOrder,
    IBackwardCallback,
    ICallback,
    ICheckpointCallback,
    ICriterionCallback,
    IListener,
    IMetricCallback,
    IOptimizerCallback,
    ISchedulerCallback,
    innermost,
    method_of,
)
from runnerkit.checkpoints.weights import find_weights
from runnerkit.engine import IEngine
from runnerkit.logger import ILogger
from runnerkit.loop.attributes import ProcessState
from runnerkit.loop.checks import check_one_loader
from runnerkit.loop.hooks import call_hook
from runnerkit.metrics.renamed import NamedMetrics
from runnerkit.passes.engine_in_use import borrow_engine
from runnerkit.passes.restored_state import modules_in, restoring_attributes, restoring_rng_and_modes
from runnerkit.passes.scratch_runner import scratch_copy
from runnerkit.resume.run_weights import RunWeights
from runnerkit.types import Criterion, Metrics, Model

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

logger = logging.getLogger(__name__)

# Events that callbacks of a run under way get from an evaluation within it.
_LOADER_EVENTS = ("on_loader_start", "on_batch_start", "on_batch_end", "on_loader_end")


class WeightsCallback(ICallback):
    """A callback that loads weights into the model before the evaluation, of which each process reads its shards.

    Args:
        source: checkpoint, logdir, or file of weights.
    """

    order = CallbackOrder.Internal

    def __init__(self, source: str | Path) -> None:
        find_weights(source, which="last")  # raises before any process starts
        self._source = source

    def on_stage_start(self, runner: IRunner) -> None:
        RunWeights(runner).load_from(find_weights(self._source, which="last"))


@dataclass(eq=False)
class EvaluationHooks(ProcessState):
    """Hooks that replace those of a runner, so that nothing is trained or written.

    Args:
        runner: provides the model, the criterion and callbacks.
        loader: the loader to evaluate, under the key "valid".
        model: None uses the runner's.
        criterion: None uses the runner's.
        engine: None uses the one of the run under way, if any, else that of :meth:`entered`.
        callbacks: in addition to the runner's criterion; None uses all callbacks that neither train nor save.
        own_callbacks: callbacks that show progress or load weights, in addition to all others.
        trained_with: callbacks that were passed to the training in this process.
    """

    stages = ("evaluate",)

    runner: IRunner
    loader: Iterable[Any]
    model: Model | None
    criterion: Criterion | None
    engine: IEngine | None
    callbacks: dict[str, ICallback] | None
    own_callbacks: dict[str, ICallback]
    trained_with: Mapping[str, ICallback]

    def __post_init__(self) -> None:
        check_one_loader(self.loader, reader="evaluate_loader")
        self._of_run: dict[str, ICallback] | None = None  # callbacks of the run under way, if there is one
        self._is_called_by_runner = False

    @contextmanager
    def entered(self, *, otherwise: Callable[[], IEngine]) -> Iterator[None]:
        """Use what a run under way has made: its engine, the model as it prepared it, its criterion and callbacks.

        Afterwards the runner, all modes and all generators are as before. Within a run, every rank must call.

        Args:
            otherwise: returns the engine if none is given and no run is under way.
        """
        runner = self.runner
        # Not on a copy: bound methods and callbacks that the user kept refer to this runner.
        stage = runner.current_run.stage
        modules = modules_in([*vars(runner).values(), stage.training_model, self.model, self.criterion])
        with (
            restoring_attributes(runner),
            restoring_rng_and_modes(modules),
            stage.evaluation_weights.evaluating(),
        ):
            if stage.training_model is not None:
                callers = _callers([runner, *runner.callbacks.values()])
                self._is_called_by_runner = any(each is runner for each in callers)
                others = {
                    key: each for key, each in runner.callbacks.items() if not any(each is one for one in callers)
                }
                self._of_run = others | _with_separate_state(others, runner)
                self.criterion = self.criterion if self.criterion is not None else runner.criterion
            loads = any(isinstance(each, WeightsCallback) for each in self.own_callbacks.values())
            self.model, self.engine = borrow_engine(
                self.model, self.engine, trained=stage.training_model, trained_by=runner.engine, otherwise=otherwise,
                replaces_weights=loads and (self.model is None or self.model is runner.model),
            )  # fmt: skip
            # Other processes send back the weights of what they evaluated.
            runner.model = self.model if self.model is not None else runner.model
            runner.criterion = self.criterion if self.criterion is not None else runner.criterion
            yield

    def evaluate(self) -> Metrics:
        """Run the runner, whose run has these hooks, and return the loader's metrics."""
        metrics = NamedMetrics(self.runner.run().loader_metrics)
        if not metrics and self.runner.engine.is_main_process:
            logger.warning(
                "evaluate_loader found no metrics: there is no criterion, no callback computes any, and handle_batch "
                "sets none; pass criterion=, or for example callbacks=[AccuracyCallback('logits', 'targets')]"
            )
        return metrics

    def receives(self, listener: IListener, event: str) -> bool:
        """Return whether a listener gets an event of the evaluation.

        In a run under way, its listeners get those of a loader and its batches. Those in whose methods the evaluation
        was called do not take part: they would call it again.
        """
        if self._of_run is None or any(listener is each for each in self.added.values()):
            return True
        return event in _LOADER_EVENTS and not (listener is self.runner and self._is_called_by_runner)

    @property
    def _caller_callbacks(self) -> Mapping[str, ICallback]:
        """Callbacks of the calling process, which get the state of the callbacks that ran."""
        if self.callbacks is not None:
            return self.callbacks
        return self.trained_with if self._of_run is None else {}

    @property
    def added(self) -> dict[str, ICallback]:
        """Callbacks that take part in the evaluation only."""
        return (self.callbacks or {}) | self.own_callbacks

    def get_engine(self) -> IEngine:
        assert self.engine is not None, "entered() comes first"
        return self.engine

    def get_stage_len(self, stage: str) -> int:
        return 1

    def get_loggers(self) -> dict[str, ILogger]:
        return {}

    def get_loaders(self, stage: str) -> dict[str, Any]:
        return {"valid": self.loader}

    def get_model(self, stage: str) -> Model:
        model: Model | None = self.model if self.model is not None else self.runner.model
        return model if model is not None else call_hook(self.runner.get_model, stage=stage)

    def get_criterion(self, stage: str) -> Criterion | None:
        return self.criterion if self.criterion is not None else call_hook(self.runner.get_criterion, stage=stage)

    def get_optimizer(self, stage: str, model: Any) -> None:
        return None

    def get_scheduler(self, stage: str, optimizer: Any) -> None:
        return None

    def get_callbacks(self, stage: str) -> dict[str, ICallback]:
        training = (IBackwardCallback, IOptimizerCallback, ISchedulerCallback, ICheckpointCallback)
        known = self._of_run if self._of_run is not None else call_hook(self.runner.get_callbacks, stage=stage)
        of_runner = {
            key: each
            for key, each in known.items()
            if not isinstance(innermost(each), training)
            and not each.requires
            and not innermost(each).shapes_training  # they would evaluate a part of the loader
        }
        if self.callbacks is None:
            return of_runner | self.own_callbacks
        criteria = {key: each for key, each in of_runner.items() if isinstance(innermost(each), ICriterionCallback)}
        return criteria | self.callbacks | self.own_callbacks


def _callers(listeners: Iterable[IListener]) -> list[IListener]:
    """Return the listeners whose event methods are on the call stack."""
    codes: dict[CodeType, list[tuple[IListener, Any]]] = {}
    for listener in listeners:
        for each in {id(each): each for each in (listener, _inner(listener))}.values():
            for method in (method_of(each, event) for event in EVENTS):
                function, owner = (
                    (method.__func__, method.__self__) if isinstance(method, MethodType) else (method, None)
                )
                if isinstance(function, FunctionType):
                    codes.setdefault(function.__code__, []).append((listener, owner))
    found, frame = [], inspect.currentframe()
    while frame is not None:
        for listener, owner in codes.get(frame.f_code, ()):
            if owner is None or frame.f_locals.get(frame.f_code.co_varnames[0]) is owner:
                found.append(listener)
        frame = frame.f_back
    return found


def _with_separate_state(callbacks: Mapping[str, ICallback], runner: IRunner) -> dict[str, ICallback]:
    """Copy the callbacks that compute metrics: their sums over the loader under way must not change."""
    counting = {key: each for key, each in callbacks.items() if isinstance(innermost(each), IMetricCallback)}
    copies = scratch_copy(runner, callbacks=counting.values()).callbacks if counting else {}
    return {key: copies[key] for key in counting}


def _inner(listener: IListener) -> IListener:
    return innermost(listener) if isinstance(listener, ICallback) else listener
