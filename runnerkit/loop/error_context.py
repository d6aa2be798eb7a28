"""Notes added to an exception that ends a run: its position in the run, and remedies if memory ran out."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from runnerkit.precision import FP32
from runnerkit.sampling.loader_members import LoaderMembers
from runnerkit.types import as_dict

if TYPE_CHECKING:
    from runnerkit.callback import IRunner
    from runnerkit.engine import IEngine

# Messages of plain RuntimeErrors that torch raises for the CPU's allocator and CUDA's libraries.
_MEMORY_ERRORS = ("out of memory", "can't allocate memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")


def add_context(runner: IRunner, error: BaseException) -> None:
    """Add the position in the run to an exception of the user's code, and remedies if memory ran out."""
    models = as_dict(runner.current_run.stage.training_model)
    place = f"loader {runner.loader_key!r}, epoch {runner.epoch_step}, rank {runner.engine.rank}"
    if not runner.loader_key:
        error.add_note(f"before the first loader, rank {runner.engine.rank}")
    elif not runner.is_within_loader:
        error.add_note(f"after batch {runner.loader_batch_step} of {place}")
    elif runner.batch is None:
        error.add_note(f"while batch {runner.loader_batch_step} of {place} was fetched")
    else:
        error.add_note(f"in batch {runner.loader_batch_step} of {place}: {_described(runner.batch)}")
    if is_out_of_memory(error):
        error.add_note(_what_needs_less(runner.engine, runner.batch, is_training=runner.is_train_loader))
    elif is_out_of_shared_memory(error):
        error.add_note(_what_needs_less_shared_memory(runner.loader))
    elif runner.is_train_loader and _is_about_a_method(error, models, runner.engine):
        error.add_note(
            "the engine averages gradients of the model's forward pass only, so call none of its other methods to "
            "train: let forward choose: self.model(x, part='encode'). self.engine.unwrap(self.model) has the "
            "model's attributes, to be read"
        )
    elif isinstance(runner.batch, Mapping) and _is_about_a_key(error):
        key = next(iter(runner.batch), "features")
        error.add_note(f"the batch is a dict, and unpacking it gives its keys: read batch[{key!r}]")
    elif explained := runner.engine.explain(error, models):
        error.add_note(explained)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a GPU or the host ran out of memory.

    >>> is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory")), is_out_of_memory(RuntimeError("another"))
    (True, False)
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _MEMORY_ERRORS)


def is_out_of_shared_memory(error: BaseException) -> bool:
    """Return whether a loader's worker failed or was killed because /dev/shm is full.

    >>> is_out_of_shared_memory(RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_0>: No space"))
    True
    """
    words = ("shared memory(shm)", "out of shared memory", "unable to write to file </torch_")
    return isinstance(error, RuntimeError) and any(each in str(error) for each in words)


def _is_about_a_method(error: BaseException, models: Mapping[str, Any], engine: IEngine) -> bool:
    """Return whether something other than the forward pass of a wrapped or sharded model was called."""
    wrappers = [each for each in models.values() if engine.unwrap(each) is not each]
    if isinstance(error, AttributeError):
        return any(str(error).startswith(f"'{type(each).__name__}' object ") for each in wrappers)
    return isinstance(error, RuntimeError) and bool(wrappers) and "mixed torch.Tensor and DTensor" in str(error)


def _is_about_a_key(error: BaseException) -> bool:
    """Return whether a str was used as if it were a tensor."""
    message = str(error)
    is_attribute = isinstance(error, AttributeError) and message.startswith("'str' object ")
    return is_attribute or (isinstance(error, TypeError) and message.endswith("must be Tensor, not str"))


def _what_needs_less_shared_memory(of: Any) -> str:
    loader = LoaderMembers(of)
    kept = f"{loader.num_workers} x {loader.prefetch_factor}"
    try:
        usage = shutil.disk_usage("/dev/shm")  # where torch puts batches
        room = f"{usage.free / 1e6:,.1f} MB of {usage.total / 1e6:,.1f} MB are free there now"
    except OSError as error:
        room = f"its size is unknown: {error.strerror}"
    return (
        f"no room in /dev/shm, through which workers send batches: {room}; this loader keeps up to {kept} batches "
        "there (num_workers x prefetch_factor). Make it larger (docker run --shm-size=8g; mount -o remount,size=8g "
        "/dev/shm), or use fewer workers, a smaller prefetch_factor or batch_size"
    )


def _what_needs_less(engine: IEngine, batch: Any, *, is_training: bool) -> str:
    of_batch = f" on a batch of {_described(batch)}" if batch is not None else ""
    remedies = ["a smaller batch_size"]
    if is_training:
        remedies[0] += ", with OptimizerCallback(accumulation_steps=...) for the same effective batch size"
        if isinstance(engine.precision, FP32):
            remedies.append("amp=True, which halves the size of activations")
        remedies.append(
            "checkpoint_modules=[Block] of the engine, which recomputes activations instead of storing them"
        )
        if not engine.sharded_checkpoints:
            remedies.append("FullyShardedDataParallelEngine, if weights and optimizer state take most of it")
    return f"out of memory on {engine.device}{of_batch}. To use less: {'; '.join(remedies)}"


def _described(batch: Any) -> str:
    """Describe a batch: type and shape of each tensor, type of anything else; torch's message lacks them."""
    if isinstance(batch, Mapping):
        items = [*batch.items()]
    else:
        items = [*enumerate(batch)] if isinstance(batch, list | tuple) else [("batch", batch)]
    return ", ".join(f"{key} {_kind(value)}" for key, value in items)


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}"
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__
