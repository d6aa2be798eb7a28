"""An engine of a run under way, for passes that are made within that run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar, cast

from torch import nn
from torch.optim import Optimizer

from runnerkit.engine import IEngine
from runnerkit.support.torch_internals import is_dtensor
from runnerkit.types import Model, as_dict, like

T = TypeVar("T")


def borrow_engine(
    model: Model | None,
    engine: IEngine | None,
    *,
    trained: Model | None,
    trained_by: IEngine,
    otherwise: Callable[[], IEngine],
    replaces_weights: bool,
) -> tuple[Model | None, IEngine]:
    """Return the model and the engine for a pass that may be made within a run under way.

    Args:
        model, engine: what the caller asks for; None takes those of the run, if it is under way.
        trained: the run's model as its engine `trained_by` prepared it; None if no run is under way.
        otherwise: returns the engine if there is neither.
        replaces_weights: whether the pass loads weights into the run's own model.
    Returns:
        An engine that a run uses as one that is not opened or closed: its processes, device and precision. A model that
        one engine trains as a copy for another engine, which may move it.
    Raises:
        ValueError: the pass would replace the weights of a run under way.
    """
    if engine is None:
        engine = trained_by if trained is not None else otherwise()
    if replaces_weights and (trained is not None or engine.in_use):
        raise ValueError(
            "resume= within a run would replace the weights in training: pass a model of its own, such as "
            "model=copy.deepcopy(runner.engine.unwrap(runner.model))"
        )
    if model is None and trained is not None:
        model = trained if engine is trained_by else _copied(trained, trained_by)
    if engine.in_use:
        engine = cast(IEngine, _EngineInUse(engine, [*as_dict(trained).values()]))
    return model, engine


def _copied(model: Any, engine: IEngine) -> Any:
    if engine.sharded_checkpoints:
        raise ValueError(
            f"{type(engine).__name__} shards the model while it trains: leave out engine and flags to use the same "
            "engine within the run, or call this after the run"
        )
    return like(model, {key: copy.deepcopy(engine.unwrap(each)) for key, each in as_dict(model).items()})


class _EngineInUse:
    """A view of an engine in use that forwards all calls except those that begin or end its use.

    Attributes that are set on the view are discarded with it.
    """

    in_use = True

    def __init__(self, engine: IEngine, models: list[Any]) -> None:
        self._engine, self._models = engine, models

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def launch(self, fn: Callable[[], T]) -> T:
        return fn()

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        return self._engine.gather_rounds(fn())

    def setup(self) -> None:
        pass

    def cleanup(self) -> None:
        pass

    def record_failure(self, error: BaseException) -> None:
        pass  # the run does, if the error ends it

    def making_model(self, *, seed: int) -> AbstractContextManager[Any]:
        return nullcontext()

    def prepare_model(self, model: nn.Module) -> nn.Module:
        is_prepared = any(map(is_dtensor, model.parameters())) or any(model is each for each in self._models)
        return model if is_prepared else IEngine.prepare_model(self._engine, model)

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        return models, optimizers

    def release(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        return models, optimizers


IEngine.register(_EngineInUse)
