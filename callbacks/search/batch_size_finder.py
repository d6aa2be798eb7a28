"""Search for the largest batch size that fits in memory."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runnerkit.callback import (
    Callback,
    CallbackOrder,
    ICallback,
    IMetricCallback,
    IWeightAverageCallback,
    innermost,
)
from runnerkit.checkpoints.plain_state import copied
from runnerkit.loop.batch_size import batch_size_of
from runnerkit.loop.error_context import is_out_of_memory
from runnerkit.models.restored import restored
from runnerkit.passes.recomputation import SingleRankEngine
from runnerkit.passes.scratch_runner import scratch_copy
from runnerkit.sampling.loader_members import LoaderMembers
from runnerkit.sampling.sharding import batches_of, count_batches
from runnerkit.seeding.generators import keep_rng
from runnerkit.support.arguments import check_integers
from runnerkit.types import as_dict, each_tensor, like

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["BatchSizeFinder"]

logger = logging.getLogger(__name__)


class BatchSizeFinder(Callback):
    """Make training steps with increasing batch sizes until one runs out of memory; then the stage ends without an
    epoch.

    Sizes double from `start`, then bisect between the largest that fits and the smallest that does not. Each batch
    repeats the rows of the training loader's first batch, so other rows may need more memory, for example longer texts.
    All processes try the same sizes, and a size must fit in each of them. Each makes its steps alone, so that none
    waits for one that ran out of memory: with FSDP2, on copies of its shards, with the memory that a step among all
    takes, except for buffers of the communication library. Limits: your own code must not communicate in a step,
    SyncBatchNorm raises, and a process that cannot even hold the copies, without a batch, ends the run.

    Weights, optimizer, gradient scaler, random number generators and loaders are restored afterwards. On a CPU, the
    system kills a process that runs out of memory, so pass `max_size` there.

    Args:
        start: first batch size, >= 1; batch norm needs two rows.
        max_size: largest batch size to try; None is one epoch of this process in a single batch.
        num_steps: steps per size; the first allocates the optimizer's state, which the next need in addition.

    Attributes:
        batch_size: the largest size that fits, per process; None before the run.
        tried: {size: whether it fits}, in order.

    >>> BatchSizeFinder(max_size=1024).start
    2
    """

    shapes_training = True

    def __init__(self, start: int = 2, max_size: int | None = None, num_steps: int = 3) -> None:
        super().__init__(order=CallbackOrder.External + 1)  # after those of the user's order
        check_integers(self, start=start, num_steps=num_steps)
        check_integers(self, or_none=True, max_size=max_size)
        if max_size is not None and max_size < start:
            raise ValueError(f"BatchSizeFinder: max_size must be >= start={start}, got {max_size}")
        self.start = start
        self.max_size = max_size
        self.num_steps = num_steps
        self.batch_size: int | None = None
        self.tried: dict[int, bool] = {}

    def on_stage_start(self, runner: IRunner) -> None:
        self.batch_size, self.tried = None, {}
        key = self._check(runner)
        with keep_rng(), _kept(runner):
            batch, num_batches = _first_batch(runner, key), count_batches(runner.loaders[key])
            if self.max_size is None and num_batches is None:
                raise ValueError(f"BatchSizeFinder needs max_size, because the length of loader {key!r} is unknown")
            limit = self.max_size or batch_size_of(batch) * (num_batches or 1)
            self.batch_size = self._search(runner, key, batch, max(limit, self.start))
        runner.stage_epoch_len = 0
        logger.info("the largest batch size that fits: %d of %s", self.batch_size, self.tried)

    def _check(self, runner: IRunner) -> str:
        key = next((key for key in runner.loaders if key.startswith("train")), None)
        if key is None or runner.optimizer is None:
            raise ValueError(f"BatchSizeFinder needs a loader to train on; the loaders are {sorted(runner.loaders)}")
        if runner.is_resumed:
            raise ValueError("BatchSizeFinder cannot continue from a checkpoint: leave out resume")
        if isinstance(runner.loaders[key], Iterator):
            raise ValueError(
                f"loader {key!r} yields each batch once, and BatchSizeFinder would consume one: pass a DataLoader"
            )
        if runner.engine.num_processes > 1 and any(
            isinstance(each, nn.SyncBatchNorm) for model in as_dict(runner.model).values() for each in model.modules()
        ):
            raise ValueError(
                "BatchSizeFinder would hang if one process runs out of memory while others wait for it in "
                "SyncBatchNorm: find the size without sync_bn"
            )
        return key

    def _search(self, runner: IRunner, key: str, batch: Any, limit: int) -> int:
        fits, too_large, size = 0, limit + 1, self.start
        while fits < size < too_large:
            if self._fits(runner, key, batch, size):
                fits = size
            else:
                too_large = size
            size = min(2 * fits, limit) if too_large > limit else (fits + too_large) // 2
            size = size if fits else 0
        if not fits:
            raise RuntimeError(
                f"a step with {self.start} rows already runs out of memory on {runner.engine.device}: make the model "
                "smaller, or use amp=True"
            )
        return fits

    def _fits(self, runner: IRunner, key: str, batch: Any, size: int) -> bool:
        models, optimizers = as_dict(runner.current_run.stage.training_model), as_dict(runner.optimizer)
        fits = True
        with runner.engine.training_alone(models, optimizers) as alone:
            try:
                _make_steps(runner, alone, key, batch, size=size, num_steps=self.num_steps)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
        del alone
        _free(runner)
        # Every rank must enter, because this reduces: a size must fit in all processes.
        of_all = torch.tensor(float(fits), device=runner.engine.device)
        self.tried[size] = bool(runner.engine.reduce(of_all, "min"))
        return self.tried[size]


def _first_batch(runner: IRunner, key: str) -> Any:
    loader = runner.loaders[key]
    if LoaderMembers(loader).num_workers:
        runner.engine.settle()
    return next(iter(batches_of(loader)))


def _make_steps(
    runner: IRunner, models: dict[str, nn.Module], key: str, batch: Any, *, size: int, num_steps: int
) -> None:
    """Train on batches of `size` rows as the run would, on a copy of the runner, without communication."""
    kept = {name: each for name, each in runner.callbacks.items() if _takes_part(each)}
    alone = scratch_copy(runner, callbacks=kept.values())
    num_rows = batch_size_of(batch)
    rows = torch.arange(size) % num_rows

    def repeated(tensor: Tensor) -> Tensor:
        return tensor[rows.to(tensor.device)] if tensor.ndim and len(tensor) == num_rows else tensor

    vars(alone).update(
        engine=SingleRankEngine(runner.engine), model=like(runner.model, models), loggers={},
        callbacks={name: alone.callbacks[name] for name in kept}, loader_key=key, is_train_loader=True,
        loader_batch_step=0, loader_batch_len=1,
    )  # fmt: skip
    listeners = alone.current_run.stage.listeners
    listeners.bind(alone, alone.callbacks.values())
    for model in models.values():
        model.train()
    try:
        with torch.enable_grad():
            listeners.emit("on_loader_start", alone)
            for _ in range(num_steps):
                alone.loader_batch_step = 0  # the last batch of a loader makes a step despite accumulation
                alone.current_run.run_batch(alone, alone.engine.to_device(each_tensor(batch, repeated)))
    finally:
        vars(alone).clear()  # break reference cycles, which would keep the batch until a garbage collection


def _takes_part(callback: ICallback) -> bool:
    inner = innermost(callback)
    if inner.shapes_training or isinstance(inner, IMetricCallback | IWeightAverageCallback):
        return False
    return callback.order < CallbackOrder.Scheduler


def _free(runner: IRunner) -> None:
    """Free the memory of a step and reset the gradient scaler, which a failed step leaves unusable."""
    for optimizer in as_dict(runner.optimizer).values():
        runner.engine.zero_grad(optimizer)
    runner.engine.precision.setup(runner.engine.device)
    if runner.engine.device.type == "cuda":
        gc.collect()  # reference cycles of user code
        torch.cuda.empty_cache()


@contextmanager
def _kept(runner: IRunner) -> Iterator[None]:
    """Restore criteria and precision on exit."""
    precision = copied(runner.engine.precision.state_dict())
    try:
        with restored(each for each in as_dict(runner.criterion).values() if isinstance(each, nn.Module)):
            yield
    finally:
        runner.engine.precision.load_state_dict(precision)
