"""A loader evaluated once more by each process alone: the numbers that a job of one process would give."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor, nn

from runnerkit import components
from runnerkit.callback import EVENTS, CallbackOrder
from runnerkit.engine import IEngine
from runnerkit.loader_metrics import reduce_metrics
from runnerkit.metrics import LoaderMeans
from runnerkit.seeding import derive_seed, keep_rng, set_global_seed
from runnerkit.types import Batch, Metrics

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

T = TypeVar("T")


def evaluate_alone(runner: IRunner, batches: Sequence[Sequence[int]], *, attempt: int = 0) -> Metrics:
    """Evaluate `batches` of the loader that just ended, as if this process had no others; the runner stays as it was.

    What takes part: `handle_batch`, and callbacks that come before the backward pass (criteria and metrics). Every rank
    may call, for none waits for another; a user's own collectives in `handle_batch` need all of them to.

    Args:
        runner: at the end of an evaluation loader, a DataLoader whose weights are those that were evaluated.
        batches: indices of the loader's data set.
        attempt: evaluations that draw random numbers draw others for another one.
    Returns:
        what batches and callbacks logged for the loader.
    """
    loader = copy.copy(runner.loader)
    vars(loader).pop("_feed", None)  # whose batches are those of this process's share
    vars(loader)["batch_sampler"] = batches  # as in runnerkit.sharding.shard_loader: all else stays as the user set it
    loader._iterator = None
    kept = components.pause_loader(runner)
    kept |= {name: getattr(runner, name) for name in ("engine", "loggers", "_listeners")}
    listeners = _metric_listeners(runner)
    vars(runner).update(
        loader=loader, engine=Alone(runner.engine), loggers={}, _listeners=listeners, _means=LoaderMeans(),
        loader_batch_step=0, loader_sample_step=0, loader_batch_len=len(batches), loader_metrics={},
    )  # fmt: skip
    try:
        with keep_rng():
            set_global_seed(derive_seed(runner.seed, "recomputation", attempt))
            runner._emit("on_loader_start")
            for batch in runner._batches():
                runner._run_batch(batch)
            reduce_metrics(runner)
            runner._emit("on_loader_end")
        return {name: float(value) for name, value in runner.loader_metrics.items()}
    finally:
        vars(runner).update(kept)


def _metric_listeners(runner: IRunner) -> components.Listeners:
    metrics = [each for each in runner.callbacks.values() if each.order < CallbackOrder.Backward]
    active = components.active(runner, metrics)
    return {event: tuple(getattr(each, event) for each in active if each.listens_to(event)) for event in EVENTS}


class Alone(IEngine):
    """An engine as it would be without its other processes: the same device and precision, nobody to wait for.

    Args:
        engine: set up; trains nothing meanwhile.
    """

    def __init__(self, engine: IEngine) -> None:
        super().__init__(channels_last=engine.channels_last)
        self.engine = engine
        self.device = engine.device
        self.precision = engine.precision

    def to_device(self, batch: Batch) -> Batch:
        return self.engine.to_device(batch)

    def autocast(self) -> AbstractContextManager[Any]:
        return self.engine.autocast()

    def settle(self) -> None:
        self.engine.settle()

    def unwrap(self, model: nn.Module) -> nn.Module:
        return self.engine.unwrap(model)

    def wrap(self, model: nn.Module) -> nn.Module:
        return model

    def launch(self, fn: Callable[[], T]) -> T:
        return fn()

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        return self.gather_rounds(fn())

    def setup(self) -> None:
        pass

    def reduce(self, tensor: Tensor, op: Literal["sum", "mean", "min", "max"] = "sum") -> Tensor:
        return tensor.clone()

    def gather_object(self, value: T) -> list[T]:
        return [value]

    def broadcast_object(self, value: T) -> T:
        return value

    def barrier(self) -> None:
        pass

    def no_sync(self, model: nn.Module) -> AbstractContextManager[Any]:
        return nullcontext()
