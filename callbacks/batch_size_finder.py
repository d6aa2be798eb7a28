"""The largest batch that a training step has memory for, found by trying."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from runnerkit import components
from runnerkit.arguments import check_integers
from runnerkit.batch_size import batch_size_of
from runnerkit.callback import (
    Callback,
    CallbackOrder,
    ICallback,
    IMetricCallback,
    IWeightAverageCallback,
    innermost,
)
from runnerkit.metrics import LoaderMeans
from runnerkit.recomputation import Alone
from runnerkit.sampling.sharding import batches_of, count_batches
from runnerkit.scratch_runner import scratch_copy
from runnerkit.seeding import keep_rng
from runnerkit.storage.plain_state import copied
from runnerkit.types import as_dict, each_tensor, like

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

logger = logging.getLogger(__name__)

# What allocators say: torch's on CUDA, on CPUs, on Apple's GPUs; cuBLAS for its workspace.
_WORDS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


class BatchSizeFinder(Callback):
    """Make training steps with larger and larger batches until one runs out of memory; then the stage ends, without an
    epoch.

    Sizes double from `start` on, and between the largest that fits and the smallest that does not they are bisected. A
    batch is the training loader's first one, its rows repeated, so what it costs is what those rows cost: a longer text
    costs more. Several processes try the same sizes, and what does not fit in one fits in none.

    Weights, the optimizer, the gradient scaler and random numbers are as before afterwards, and no loader has moved.
    A CPU has no memory limit of its own: the system ends the process, so pass `max_size` there.

    Args:
        start: >= 1; batch norm wants two rows.
        max_size: where to stop; None is a whole epoch of this process, as one batch.
        num_steps: for each size; the first one makes the optimizer's state, the next needs memory beside it.

    Attributes:
        batch_size: the largest that fits, of one process; None before the run.
        tried: {size: whether it fits}, in order.

    >>> BatchSizeFinder(max_size=1024).start
    2
    """

    shapes_training = True

    def __init__(self, start: int = 2, max_size: int | None = None, num_steps: int = 3) -> None:
        super().__init__(order=CallbackOrder.External + 1)  # when all others are set up
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
                raise ValueError(f"loader {key!r} has no length, which sizes would end at: pass max_size")
            limit = self.max_size or batch_size_of(batch) * (num_batches or 1)
            self.batch_size = self._search(runner, key, batch, max(limit, self.start))
        runner.stage_epoch_len = 0
        logger.info("the largest batch that fits: %d of %s", self.batch_size, self.tried)

    def _check(self, runner: IRunner) -> str:
        key = next((key for key in runner.loaders if key.startswith("train")), None)
        if key is None or runner.optimizer is None:
            raise ValueError(f"BatchSizeFinder makes training steps; the loaders are {sorted(runner.loaders)}")
        if runner.is_resumed:
            raise ValueError("BatchSizeFinder trains nothing that a checkpoint could go on with: leave resume out")
        if isinstance(runner.loaders[key], Iterator):
            raise ValueError(
                f"loader {key!r} gives each batch once, and BatchSizeFinder would take one: pass a DataLoader"
            )
        for model in as_dict(runner.model).values():
            modules, parameters = list(model.modules()), list(model.parameters())
            waits = any(isinstance(each, nn.SyncBatchNorm) for each in modules) and runner.engine.num_processes > 1
            if waits or any(hasattr(each, "full_tensor") for each in parameters):
                raise ValueError(
                    "BatchSizeFinder would hang where one process runs out of memory and others wait for it, as those "
                    "of a sharded model or of SyncBatchNorm do in each step: find the size with "
                    "DistributedDataParallelEngine, without sync_bn"
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
        fits = True
        try:
            _make_steps(runner, key, batch, size=size, num_steps=self.num_steps)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            fits = False
        _free(runner)
        # Every rank must enter: what does not fit in one is too large for all.
        of_all = torch.tensor(float(fits), device=runner.engine.device)
        self.tried[size] = bool(runner.engine.reduce(of_all, "min"))
        return self.tried[size]


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(each in str(error) for each in _WORDS)


def _first_batch(runner: IRunner, key: str) -> Any:
    loader = runner.loaders[key]
    if getattr(loader, "num_workers", 0):
        runner.engine.settle()
    return next(iter(batches_of(loader)))


def _make_steps(runner: IRunner, key: str, batch: Any, *, size: int, num_steps: int) -> None:
    """Train on batches of `size` rows as the run would, on a copy of the runner, waiting for no other process."""
    kept = {name: each for name, each in runner.callbacks.items() if _takes_part(each)}
    alone = scratch_copy(runner, callbacks=kept.values())
    choose = runner.engine.training_model if runner.engine.num_processes == 1 else runner.engine.unwrap
    models = {name: choose(each) for name, each in as_dict(runner._training_model).items()}
    num_rows = batch_size_of(batch)
    rows = torch.arange(size) % num_rows

    def repeated(tensor: Tensor) -> Tensor:
        return tensor[rows.to(tensor.device)] if tensor.ndim and len(tensor) == num_rows else tensor

    vars(alone).update(
        engine=Alone(runner.engine), model=like(runner.model, models), loggers={}, _means=LoaderMeans(),
        callbacks={name: alone.callbacks[name] for name in kept}, loader_key=key, is_train_loader=True,
        loader_batch_step=0, loader_batch_len=1,
    )  # fmt: skip
    alone._listeners = components.bind_listeners(alone, alone.callbacks.values())
    for model in models.values():
        model.train()
    try:
        with torch.enable_grad():
            alone._emit("on_loader_start")
            for _ in range(num_steps):
                alone.loader_batch_step = 0  # each is the loader's last, which a step follows though others accumulate
                alone._run_batch(alone.engine.to_device(each_tensor(batch, repeated)))
    finally:
        vars(alone).clear()  # its listeners are of itself: the batch would stay until a garbage collection


def _takes_part(callback: ICallback) -> bool:
    inner = innermost(callback)
    if inner.shapes_training or isinstance(inner, IMetricCallback | IWeightAverageCallback):
        return False
    return callback.order < CallbackOrder.Scheduler


def _free(runner: IRunner) -> None:
    """Let go of what a step leaves, also of one that broke off: a scaler would not begin another."""
    for optimizer in as_dict(runner.optimizer).values():
        runner.engine.zero_grad(optimizer)
    runner.engine.precision.setup(runner.engine.device)
    if runner.engine.device.type == "cuda":
        gc.collect()  # what the user's code left in cycles
        torch.cuda.empty_cache()


@contextmanager
def _kept(runner: IRunner) -> Iterator[None]:
    """Put back weights, optimizers and precision, from copies on the CPU: they take no memory from the steps."""
    modules = [*as_dict(runner.model).values(), *as_dict(runner.criterion).values()]
    tensors = [
        (each, each.detach().to("cpu", copy=True))
        for module in modules
        if isinstance(module, nn.Module)
        for each in (*module.parameters(), *module.buffers())
    ]
    optimizers = [(each, copied(each.state_dict())) for each in as_dict(runner.optimizer).values()]
    precision = copied(runner.engine.precision.state_dict())
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, before in tensors:
                tensor.copy_(before)
        for optimizer, state in optimizers:
            optimizer.load_state_dict(state)
        runner.engine.precision.load_state_dict(precision)
