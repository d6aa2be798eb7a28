"""Re-evaluation of a loader by each process alone: the metrics that a single process would compute."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from runnerkit.callback import CallbackOrder, ICallback, IMetricCallback, innermost
from runnerkit.engine import IEngine
from runnerkit.passes.scratch_runner import scratch_copy
from runnerkit.sampling.loader_members import LoaderMembers
from runnerkit.seeding.generators import derive_seed, keep_rng, set_global_seed
from runnerkit.types import Batch, Metrics

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

T = TypeVar("T")


def evaluate_on_one_rank(runner: IRunner, batches: Iterable[Batch], *, num_batches: int, attempt: int = 0) -> Metrics:
    """Evaluate `batches` as the loader that just ended, on a copy of the runner, as if there were no other processes.

    Runs `handle_batch`, the runner's own start events and `on_batch_end`, and the callbacks that come before the
    backward pass (criteria) or compute metrics. They work on a :func:`scratch_copy` of the runner, so meters do not
    change. Ranks do not wait for each other, so any of them may call, unless the user's code calls collectives.

    Args:
        runner: at the end of an evaluation loader, with the weights that were evaluated.
        batches: on any device.
        num_batches: their number.
        attempt: another value gives other random numbers.
    Returns:
        the loader's metrics.
    """
    kept = {key: each for key, each in runner.callbacks.items() if _takes_part(each)}
    alone = scratch_copy(runner, callbacks=kept.values())
    vars(alone).update(
        engine=SingleRankEngine(runner.engine), loggers={}, loader_batch_step=0, loader_sample_step=0,
        loader_batch_len=num_batches, loader_metrics={},
        callbacks={key: alone.callbacks[key] for key in kept},
    )  # fmt: skip
    listeners = alone.current_run.stage.listeners
    listeners.bind(alone, alone.callbacks.values())
    if alone.listens_to("on_loader_end"):  # the runner's own event was called before
        listeners["on_loader_end"] = listeners["on_loader_end"][:-1]
    if LoaderMembers(runner.loader).num_workers:
        alone.engine.settle()
    with keep_rng():
        set_global_seed(derive_seed(runner.seed, "recomputation", attempt))
        listeners.emit("on_loader_start", alone)
        for batch in batches:
            alone.current_run.run_batch(alone, alone.engine.to_device(batch))
        alone.loader_pass.metrics.reduce(alone)
        listeners.emit("on_loader_end", alone)
    return {name: float(value) for name, value in alone.loader_metrics.items()}


def _takes_part(callback: ICallback) -> bool:
    return callback.order < CallbackOrder.Backward or isinstance(innermost(callback), IMetricCallback)


class SingleRankEngine(IEngine):
    """An engine that acts as a single process, with the device and precision of another engine.

    Args:
        engine: set up; it must not train in the meantime.
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

    def joint_gradients(self, parameters: list[Tensor]) -> AbstractContextManager[Any]:
        return self.engine.joint_gradients(parameters)

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
