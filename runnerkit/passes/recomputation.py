"""A loader evaluated once more by each process alone: the numbers that a job of one process would give."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from torch import Tensor, nn

from runnerkit import components
from runnerkit.callback import CallbackOrder, ICallback, IMetricCallback, innermost
from runnerkit.engine import IEngine
from runnerkit.loader_metrics import reduce_metrics
from runnerkit.metrics import LoaderMeans
from runnerkit.scratch_runner import scratch_copy
from runnerkit.seeding import derive_seed, keep_rng, set_global_seed
from runnerkit.types import Batch, Metrics

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

T = TypeVar("T")


def evaluate_alone(runner: IRunner, batches: Iterable[Batch], *, num_batches: int, attempt: int = 0) -> Metrics:
    """Evaluate `batches` as the loader that just ended, as if this process had no others, on a copy of the runner.

    What takes part: `handle_batch`, the runner's own start events and `on_batch_end`, and callbacks that come before
    the backward pass (criteria) or give metrics. They work on :func:`scratch_copy` of the runner, so that meters stay
    as they were. Every rank may call, for none waits for another; a user's own collectives need all of them to.

    Args:
        runner: at the end of an evaluation loader; its weights are those that were evaluated.
        batches: on any device.
        num_batches: their number.
        attempt: evaluations that draw random numbers draw others for another one.
    Returns:
        what batches and callbacks logged for the loader.
    """
    kept = {key: each for key, each in runner.callbacks.items() if _takes_part(each)}
    alone = scratch_copy(runner, callbacks=kept.values())
    vars(alone).update(
        engine=Alone(runner.engine), loggers={}, _means=LoaderMeans(), loader_batch_step=0, loader_sample_step=0,
        loader_batch_len=num_batches, loader_metrics={},
        callbacks={key: alone.callbacks[key] for key in kept},
    )  # fmt: skip
    alone._listeners = components.bind_listeners(alone, alone.callbacks.values())
    if alone.listens_to("on_loader_end"):  # what it tells, it tells once
        alone._listeners["on_loader_end"] = alone._listeners["on_loader_end"][:-1]
    if getattr(runner.loader, "num_workers", 0):
        alone.engine.settle()
    with keep_rng():
        set_global_seed(derive_seed(runner.seed, "recomputation", attempt))
        alone._emit("on_loader_start")
        for batch in batches:
            alone._run_batch(alone.engine.to_device(batch))
        reduce_metrics(alone)
        alone._emit("on_loader_end")
    return {name: float(value) for name, value in alone.loader_metrics.items()}


def _takes_part(callback: ICallback) -> bool:
    return callback.order < CallbackOrder.Backward or isinstance(innermost(callback), IMetricCallback)


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
