"""The parts of torch that runnerkit uses although they are not public, tested with each supported version."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]  # not in its __all__
from torch.autograd import profiler as autograd_profiler
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import SequentialLR
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter, _SingleProcessDataLoaderIter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

DispatchMode = TorchDispatchMode  # base class of objects that see each operation in their body
BatchNorm = _BatchNorm  # base class of batch norms of any dimension, SyncBatchNorm included
BatchOrInstanceNorm = _NormBase
COMPILED = "_orig_mod"  # where torch.compile's wrapper holds its module, and in the names of its weights
INNER_SCHEDULERS = "_schedulers"  # of SequentialLR and ChainedScheduler, and of their state
METADATA = "_metadata"  # where a state dict holds the versions of its modules
# Fused optimizers set this attribute, which the scaler reads, to unscale and skip within their kernel.
SKIPS_ITSELF = "_step_supports_amp_scaling"

# What the list of tensors of a checkpoint by torch.distributed.checkpoint is made of, by module and name.
TYPES_OF_SHARDED_CHECKPOINTS = {
    *(("torch.distributed.checkpoint.metadata", name) for name in (
        "Metadata", "TensorStorageMetadata", "TensorProperties", "ChunkStorageMetadata", "MetadataIndex", "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
    ("pathlib", "PosixPath"),
}  # fmt: skip

# One kernel for many tensors; torch's optimizers use them.
divide_each_ = torch._foreach_div_  # pyright: ignore[reportPrivateImportUsage]
multiply_each_ = torch._foreach_mul_  # pyright: ignore[reportPrivateImportUsage]
interpolate_each_ = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
norm_of_each = torch._foreach_norm  # pyright: ignore[reportPrivateImportUsage]

# Of the loaders of this process.
raise_if_a_worker_was_killed = signal_handling._error_if_any_worker_fails  # type: ignore[attr-defined]


def metadata_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the versions of modules that a model's state dict holds beside the tensors, by name of the module."""
    return getattr(state, METADATA, {})


def inner_schedulers(scheduler: Any) -> list[Any]:
    """Return the schedulers inside torch's SequentialLR or ChainedScheduler; none in others.

    >>> inner_schedulers(None)
    []
    """
    return list(getattr(scheduler, INNER_SCHEDULERS, ()))


def length_of(loader: Any) -> int:
    """Return ``len(loader)``; torch's DataLoader would otherwise warn in each batch beyond the length of a stream."""
    if not isinstance(loader, DataLoader):
        return len(loader)
    before = loader._IterableDataset_len_called
    length = len(loader)
    loader._IterableDataset_len_called = before
    return length


def _is_profiled() -> bool:
    """Return whether a profiler runs, in this thread or in all."""
    return autograd_profiler._is_profiler_enabled or _profiler_enabled()


def without_records(batches: Iterator[Any]) -> Iterator[Any]:
    """Return a loader's iterator without its record for the profiler in each batch, which takes 10 to 20 µs.

    A profiler that runs gets it. Only the iterator of a DataLoader without workers is replaced.
    """
    is_torchs = type(batches) is _SingleProcessDataLoaderIter and type(batches).__next__ is _NEXT_BATCH
    return _Fetched(batches) if is_torchs else batches  # type: ignore[arg-type]


class _Fetched:
    """The batches of an iterator, which goes on after an error."""

    def __init__(self, batches: _SingleProcessDataLoaderIter) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        return len(self._batches)

    def __next__(self) -> Any:
        batches = self._batches
        if _is_profiled() or batches._IterableDataset_len_called is not None:  # it warns of a wrong length
            return next(batches)
        batch = batches._next_data()
        batches._num_yielded += 1
        return batch


_NEXT_BATCH = _SingleProcessDataLoaderIter.__next__
_OF_SCHEDULERS = vars(lr_scheduler)  # the globals of the ``step`` that a scheduler makes, which notes each call
_HOOKED_STEP: Any = Optimizer.profile_hook_step(lambda self: None).__code__


def step(optimizer: Any) -> None:
    """Call ``optimizer.step()`` with its hooks, without its record for the profiler, which takes 10 to 20 µs.

    A profiler that runs gets the record. A ``step`` that is not the method that torch made of a class's, or what a
    scheduler made of that, is called as it is.
    """
    method: Any = None
    is_torchs = is_scheduled = False
    try:
        method, own = type(optimizer).step, vars(optimizer).get("step")
        is_scheduled = own is not None and own.__wrapped__ is method and own.__globals__ is _OF_SCHEDULERS
        is_torchs = method.__code__ is _HOOKED_STEP and (own is None or is_scheduled)
    except (AttributeError, TypeError):  # an object or a class of the user's
        pass
    if not is_torchs or _is_profiled():
        optimizer.step()
        return
    if is_scheduled:
        optimizer._opt_called = True
    arguments: Any = (optimizer,)
    options: Any = {}
    for before in chain(_global_optimizer_pre_hooks.values(), optimizer._optimizer_step_pre_hooks.values()):
        replaced = before(optimizer, arguments, options)
        if replaced is not None:
            if not isinstance(replaced, tuple) or len(replaced) != 2:
                raise RuntimeError(
                    f"{method} must return None or a tuple of (new_args, new_kwargs), but got {replaced}."
                )
            arguments, options = replaced
    method.__wrapped__(*arguments, **options)
    for after in chain(optimizer._optimizer_step_post_hooks.values(), _global_optimizer_post_hooks.values()):
        after(optimizer, arguments, options)


class UnrecordedDDP(DistributedDataParallel):
    """DistributedDataParallel whose forward pass makes no record for a profiler that does not run, of 10 to 20 µs.

    Not for ``torch.compile``, which traces through torch's own.
    """

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        own, recorded = cast(Any, self), cast(Any, super().forward)  # its methods are untyped
        if torch.compiler.is_compiling() or _is_profiled() or own._delay_all_reduce_all_params:
            return recorded(*inputs, **kwargs)
        inputs, kwargs = own._pre_forward(*inputs, **kwargs)
        return own._post_forward(own._run_ddp_forward(*inputs, **kwargs))


class _Unpacked:
    """The iterator of a DataLoader whose batches are unpacked before they reach the loader's own ``__iter__``."""

    def __init__(self, loader: DataLoader[Any], unpack: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
        self._packed, self._unpack = DataLoader._get_iterator(loader), unpack
        self._batches = unpack(self._packed)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def _reset(self, loader: DataLoader[Any]) -> None:  # for the next epoch of persistent workers
        self._packed._reset(loader)
        self._batches = self._unpack(self._packed)


def unpacks_within(loader: DataLoader[Any], unpack: Callable[[Iterator[Any]], Iterator[Any]]) -> bool:
    """Let a loader whose class overrides ``__iter__`` get batches that have passed through `unpack`.

    Returns:
        Whether it does; False if its class does not override it.
    """
    kind = type(loader)
    if kind.__iter__ is DataLoader.__iter__ or kind._get_iterator is not DataLoader._get_iterator:
        return False
    known = weakref.ref(loader)  # a cycle would keep its workers
    vars(loader)["_get_iterator"] = lambda: _Unpacked(known(), unpack)  # type: ignore[arg-type]  # it is being iterated
    return True


def forget_length(loader: DataLoader[Any]) -> None:
    """Let a loader forget that the user asked for its length, so that it does not warn in each batch beyond it."""
    loader._IterableDataset_len_called = None


def last_milestone(scheduler: SequentialLR) -> int:
    """Return the step at which the last scheduler inside a SequentialLR begins."""
    milestones: list[int] = scheduler._milestones
    return milestones[-1]


def starts_of(scheduler: Any) -> list[int]:
    """Return the step at which each scheduler inside of one begins: those of a ChainedScheduler at 0.

    >>> starts_of(None)
    []
    """
    milestones = list(scheduler._milestones) if isinstance(scheduler, SequentialLR) else []
    num_inner = len(inner_schedulers(scheduler))
    return [0, *milestones] if milestones else [0] * num_inner


def is_set_by_torch(name: str) -> bool:
    """Return whether torch's hooks, or a scheduler, set the attribute `name` on an optimizer.

    >>> is_set_by_torch("_optimizer_step_pre_hooks"), is_set_by_torch("defaults")
    (True, False)
    """
    return name in ("step", "_opt_called", "_zero_grad_profile_name") or name.startswith("_optimizer_")


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside a ``torch.compile`` wrapper, or `module` itself."""
    return getattr(module, COMPILED, module)


def clear_forward_hooks(module: nn.Module) -> None:
    """Remove all hooks of a module's forward pass, but not those of its children."""
    module._forward_hooks.clear()
    module._forward_pre_hooks.clear()


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Return whether something runs when the gradient of `parameter` is computed: a hook, or a step within backward."""
    steps_within = hasattr(parameter, "_in_backward_optimizers")
    return bool(steps_within or parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def children(module: nn.Module) -> list[tuple[str, nn.Module | None]]:
    """Return the children with their names, a child with two names twice, unlike ``named_children()``."""
    return list(module._modules.items())


def untyped(storage: torch.TypedStorage) -> torch.UntypedStorage:
    """Return the bytes of a storage without the warning of torch's public method."""
    return storage._untyped_storage


def storage_id(tensor: Tensor) -> int:
    """Return a number that tensors have in common if they share memory; also those on the meta device."""
    number: int = tensor.untyped_storage()._cdata
    return number


def is_mutable(operation: Any) -> bool:
    """Return whether an operation, as a TorchDispatchMode sees it, writes to one of its arguments."""
    return bool(operation._schema.is_mutable)


def has_no_buckets(model: nn.Module) -> bool:
    """Return whether a DistributedDataParallel sends gradients by hooks, as it does for torch.compile."""
    return isinstance(model, DistributedDataParallel) and model._use_python_reducer


def local(tensor: Any) -> Any:
    """Return this process's part of a DTensor, sharing its memory; any other tensor unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def local_parts(tensors: Iterable[Any]) -> list[Any]:
    """Return :func:`local` of each tensor."""
    tensors = [*tensors]
    return tensors if {*map(type, tensors)} == {Tensor} else [*map(local, tensors)]  # without a call for each


def is_dtensor(tensor: Any) -> TypeGuard[DTensor]:
    """Return whether a tensor is a DTensor; its class need not be imported for that."""
    return hasattr(tensor, "full_tensor")


def num_changes(tensor: Any) -> int:
    """Return a number that grows when a tensor, or the part of a DTensor in this process, is changed in place."""
    return int(tensor._version) + int(tensor._local_tensor._version if is_dtensor(tensor) else 0)


def has_sparse_gradients(module: nn.Module) -> bool:
    """Return whether a module is an embedding with ``sparse=True``."""
    return bool(getattr(module, "sparse", False))


def replace_parameters(module: nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Put tensors, parameters or not, in the places of a module's parameters; return what was there."""
    replaced = {name: module._parameters[name] for name in tensors}
    module._parameters.update(tensors)
    return replaced


def merge_dimensions(mesh: Any, names: tuple[str, ...], *, timeout_s: float) -> None:
    """Let a sum over these neighboring dimensions of a DeviceMesh be one operation, whose result has equal bits on all
    ranks.
    """
    from torch.distributed import distributed_c10d  # not in every build of torch

    group = mesh[names]._flatten().get_group()
    if group is not dist.group.WORLD:  # whose timeout is the user's
        distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def pinned(batch: Any) -> Any:
    """Copy the tensors of a batch to page-locked memory, as a loader does."""
    return pin_memory(batch)


@contextmanager
def without_worker_info() -> Iterator[None]:
    """Let ``get_worker_info()`` return None in the body, as if this worker of a data loader were not one."""
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def awaited_worker(iterator: Any) -> tuple[int, int] | None:
    """Return number and process id of the worker that a data loader's iterator waits for; None for other objects."""
    if not isinstance(iterator, _MultiProcessingDataLoaderIter):
        return None
    number = iterator._task_info[iterator._rcvd_idx][0]
    return number, iterator._workers[number].pid


def backend_without_communication() -> str:
    """Return the name of a backend whose process groups do not communicate: all processes seem to send what this one
    sends."""

    return "fake"


def drop_held_gradients(unit: Any) -> None:
    """Discard the gradients that an FSDPModule held instead of reducing them.

    Torch would add them to the next reduced gradients, and offers no way to drop them.
    """
    state = unit._get_fsdp_state()
    # A unit of torch 2.11 has one group of parameters or none.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    for parameter in (each for group in groups if group is not None for each in group.fsdp_params):
        if "unsharded_accumulated_grad" in vars(parameter):  # torch 2.15 holds them in .grad only
            parameter.unsharded_accumulated_grad = None
        if hasattr(parameter, "_unsharded_param"):
            parameter._unsharded_param.grad = None
