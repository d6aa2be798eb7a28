"""Data parallelism with one process per GPU (or several on the CPU): ``torch.nn.parallel.DistributedDataParallel``."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from runnerkit.engine import uncompiled
from runnerkit.engines.adapters import comm_hooks
from runnerkit.engines.launch.process_group_engine import ProcessGroupEngine, ProcessGroupOptions
from runnerkit.models.parameters import is_trained
from runnerkit.support.torch_internals import UnrecordedDDP, has_gradient_hooks, has_no_buckets, has_sparse_gradients

__all__ = ["DistributedDataParallelEngine"]

logger = logging.getLogger(__name__)

# DistributedDataParallel's message ends with the places of the parameters among those that are trained.
_UNUSED = re.compile(r"(?s)finished reduction in the prior iteration.*did not receive grad for rank \d+: ([\d ]+)")


class DistributedDataParallelOptions(ProcessGroupOptions, total=False):
    """Arguments of :class:`DistributedDataParallelEngine`, for engines that pass them on."""

    find_unused_parameters: bool
    static_graph: bool
    gradient_as_bucket_view: bool
    sync_bn: bool
    ddp_kwargs: dict[str, Any] | None
    comm_hook: comm_hooks.CommHook | None


class DistributedDataParallelEngine(ProcessGroupEngine):
    """Several processes that average their gradients.

    The loaders' batch_size is per process: each step uses `num_processes` batches.

    Args:
        num_processes: None means one per GPU, or 2 without GPUs; (least, most) is explained in ProcessGroupEngine.
        find_unused_parameters: allow forward passes that leave parameters unused; traverses the graph in each step.
        static_graph: promise that each step uses the same parameters in the same way, so that one traversal is enough;
            gradients are then sent in each backward pass, also while they accumulate.
        gradient_as_bucket_view: keep gradients in the communication buffers; saves their memory.
        sync_bn: share batch statistics between GPUs; on the CPU it is ignored, with a warning.
        ddp_kwargs: further arguments of DistributedDataParallel.
        comm_hook: compress gradients: "fp16", "bf16", "powersgd", or (state, hook) for ``register_comm_hook``, or a
            function that returns such a pair in each process.
        options: address, port, backend, device, devices, timeout_s, launcher as in ProcessGroupEngine; else IEngine's.

    >>> DistributedDataParallelEngine(num_processes=2).is_ddp
    True
    """

    def __init__(
        self,
        num_processes: int | tuple[int, int] | None = None,
        *,
        find_unused_parameters: bool = False,
        static_graph: bool = False,
        gradient_as_bucket_view: bool = False,
        sync_bn: bool = False,
        ddp_kwargs: dict[str, Any] | None = None,
        comm_hook: comm_hooks.CommHook | None = None,
        **options: Unpack[ProcessGroupOptions],
    ) -> None:
        super().__init__(num_processes, **options)
        self.sync_bn = sync_bn
        self.ddp_kwargs = {
            "find_unused_parameters": find_unused_parameters,
            "static_graph": static_graph,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            **(ddp_kwargs or {}),
        }
        self.comm_hook: comm_hooks.CommHook | None = comm_hooks.checked(comm_hook)
        self._exchange.allows_unused = (
            f"pass engine=dl.{type(self).__name__}(find_unused_parameters=True), instead of ddp=True"
        )
        # The user's own hook decides what is averaged, and among which ranks.
        self._exchange.compares = comm_hook is None or isinstance(comm_hook, str)

    def explain(self, error: BaseException, models: dict[str, nn.Module]) -> str | None:
        if (unused := _UNUSED.search(str(error))) is None:
            return super().explain(error, models)
        from runnerkit.checkpoints.weights import listed

        places, names = {int(each) for each in unused[1].split()}, []
        for key, model in models.items():
            own = [name for name, each in self.unwrap(model).named_parameters() if each.requires_grad]
            names += [f"{key}.{name}".lstrip(".") for place, name in enumerate(own) if place in places]
        of_one = "one of " if len(models) > 1 else ""  # the message does not say which model it is about
        return (
            f"the step before did not use {of_one}the parameters {listed(names, 10)}: use them in each step, freeze "
            f"them (requires_grad_(False)), or {self._exchange.allows_unused}"
        )

    def wrap(self, model: nn.Module) -> nn.Module:
        if not is_trained(model):
            return self.compiled(model)  # DDP rejects a module without gradients, such as a frozen teacher
        if self.comm_hook == "powersgd" and self.precision.skips_steps:
            raise ValueError(
                "comm_hook='powersgd' carries the error of each step to the next, and would keep an infinite gradient, "
                "which is normal with fp16, forever: use bf16 or fp32, or comm_hook='fp16'"
            )
        if self.sync_bn and self.device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        elif self.sync_bn:
            logger.warning("sync_bn=True is ignored: torch's SyncBatchNorm runs on GPUs only, but this is the CPU")
        device_ids = [self.device] if self.device.type == "cuda" else None
        wrapper = UnrecordedDDP if self.compile_arguments is None else DistributedDataParallel
        wrapped = wrapper(model, device_ids=device_ids, **self.ddp_kwargs)
        _free_reducer_before_group(wrapped)
        # A hook may exist on one rank only, for example to log, but all ranks must use the same layout.
        if self.num_processes > 2 and not any(self.gather_object(_has_special_gradients(wrapped))):
            _lay_out_buckets(wrapped)
        if self.comm_hook is not None:
            comm_hooks.register(self.comm_hook, wrapped)
        return self.compiled(wrapped)

    def unwrap(self, model: nn.Module) -> nn.Module:
        model = uncompiled(model)
        return model.module if isinstance(model, DistributedDataParallel) else model

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        # DDP's forward broadcasts buffers in eval mode too and would wait for ranks without a further batch. The bare
        # module does not; broadcast rank zero's buffers once so that all ranks evaluate the same model.
        module = self.unwrap(model)
        self.broadcast_buffers(module)
        return self.compiled(module)

    def backward(self, loss: Tensor, optimizer: Optimizer | None = None) -> None:
        self._exchange.note_backward()
        super().backward(loss, optimizer)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        model = uncompiled(model)
        if not isinstance(model, DistributedDataParallel) or self.ddp_kwargs["static_graph"]:
            yield  # the first step must record the full static graph
            return
        with model.no_sync(), self._exchange.silent():
            yield


def _free_reducer_before_group(model: DistributedDataParallel) -> None:
    """Reorder attributes so that `model`, if it holds the last references, frees the reducer before the group.

    The group's destructor waits for its threads, which may wait for the GIL. Dropping Python's reference releases the
    GIL first; dropping the reducer's does not (torch 2.13), and the process would hang forever.
    """
    model.process_group = vars(model).pop("process_group")


def _lay_out_buckets(model: DistributedDataParallel) -> None:
    """Make torch lay out its buckets before the first step instead of after it; every rank must call this.

    Torch does so once, in the order in which gradients arrive. With three or more processes, the last bits of a sum
    depend on a gradient's position in its bucket, so a resumed run, whose first step differs, would not reproduce them.
    This function feeds zero gradients, last parameter first, which is the order of most models.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    before = [parameter.grad for parameter in parameters]
    model.reducer.prepare_for_backward([])
    for parameter in reversed(parameters):
        parameter.backward(torch.zeros_like(parameter))
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient


def _has_special_gradients(model: DistributedDataParallel) -> bool:
    """Return whether buckets are never rebuilt, or zeros would mislead a static graph or reach the user's hooks."""
    learns = model.find_unused_parameters or model.static_graph or model.mixed_precision is not None
    is_sparse = any(map(has_sparse_gradients, model.modules()))
    return learns or is_sparse or has_no_buckets(model) or any(map(has_gradient_hooks, model.parameters()))
