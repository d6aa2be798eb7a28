"""One process a GPU (or several on the CPU), gradients averaged: ``torch.nn.parallel.DistributedDataParallel``."""

import gc
import logging
import socket
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, though not in torch's __all__
from torch.nn.parallel import DistributedDataParallel

from runnerkit.engine import IEngine
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.engines.spawn import spawn
from runnerkit.precision import Precision

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SETTLE_S = 0.005
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class DistributedDataParallelEngine(IEngine):
    """Train in several processes that average their gradients.

    Started by plain python or a notebook it spawns the processes itself; started by torchrun it joins those there are.
    The loaders' batch_size is that of one process: `num_processes` of them make one step.

    Args:
        num_processes: None is one for each GPU, or 2 without GPUs; a launcher's number overrides it.
        address, port: where spawned processes meet; None is a file on this machine, which needs no port.
        backend: None is nccl on GPUs, gloo on CPUs.
        device: "cuda" or "cpu"; None is the GPUs if there are any.
        find_unused_parameters: as DistributedDataParallel's.
        sync_bn: share batch statistics between GPUs (a CPU cannot, and is warned).
        timeout_s: seconds after which a process that waits for another gives up.
        ddp_kwargs: further arguments of DistributedDataParallel.
        comm_hook: (state, hook) for ``register_comm_hook``.
        precision: None is fp32.

    >>> DistributedDataParallelEngine(num_processes=2).is_ddp
    True
    """

    is_ddp = True

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        address: str | None = None,
        port: int | None = None,
        backend: str | None = None,
        device: Literal["cuda", "cpu"] | None = None,
        find_unused_parameters: bool = False,
        sync_bn: bool = False,
        timeout_s: float = 600,
        ddp_kwargs: dict[str, Any] | None = None,
        comm_hook: tuple[Any, Callable[..., Any]] | None = None,
        precision: Precision | None = None,
    ) -> None:
        super().__init__(precision=precision)
        if num_processes is not None and num_processes < 1:
            raise ValueError(f"num_processes must be >= 1, got {num_processes}; None is one for each GPU")
        if (address is None) != (port is None):
            raise ValueError(f"address and port go together, got address={address!r}, port={port!r}; leave both out")
        self._wanted_device = device
        environment = ProcessEnvironment.read()
        self.num_processes = environment.world_size if environment is not None else num_processes or self._num_spawned()
        self.address = address
        self.port = port
        self.backend = backend
        self.sync_bn = sync_bn
        self.timeout_s = timeout_s
        self.ddp_kwargs = {"find_unused_parameters": find_unused_parameters, **(ddp_kwargs or {})}
        self.comm_hook = comm_hook
        self._owns_group = False

    def launch(self, fn: Callable[[], T]) -> T:
        if ProcessEnvironment.read() is not None:
            try:
                return fn()
            finally:
                self.cleanup()
        return spawn(fn, num_processes=self.num_processes, variables=self._meeting_point())

    def _num_spawned(self) -> int:
        return max(1, torch.cuda.device_count()) if self._uses_cuda() else 2

    def _uses_cuda(self) -> bool:
        return self._wanted_device == "cuda" or (self._wanted_device is None and torch.cuda.is_available())

    def _meeting_point(self) -> dict[str, str]:
        if self.address is None:
            return {}
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((self.address, self.port))
            except OSError as error:
                raise OSError(
                    f"cannot listen on {self.address}:{self.port} ({error.strerror}); another job may have the port: "
                    "choose another, or leave address and port out"
                ) from error
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}

    def setup(self) -> None:
        environment = ProcessEnvironment.read()
        assert environment is not None, "launch() comes first"
        self.process_index = environment.rank
        self.local_process_index = environment.local_rank
        self.num_processes = environment.world_size
        self.device = self._open_device()
        self.precision.setup(self.device)
        if not dist.is_initialized():
            store = FileStore(environment.store, environment.world_size) if environment.store else None
            dist.init_process_group(
                self.backend or ("nccl" if self.device.type == "cuda" else "gloo"),
                store=store,
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=timedelta(seconds=self.timeout_s),
            )
            self._owns_group = True

    def _open_device(self) -> torch.device:
        if not self._uses_cuda():
            return torch.device("cpu")
        if self.local_process_index >= torch.cuda.device_count():
            raise RuntimeError(
                f"process {self.local_process_index} here has no GPU, since there are {torch.cuda.device_count()}: "
                "start at most that many processes, or pass cpu=True"
            )
        torch.cuda.set_device(self.local_process_index)
        return torch.device("cuda", self.local_process_index)

    def cleanup(self) -> None:
        if self._owns_group and dist.is_initialized():
            gc.collect()  # wrapped models hold the group in cycles; its threads must not outlive it to the exit
            dist.destroy_process_group()
        self._owns_group = False

    def reduce(self, tensor: Tensor, op: Literal["sum", "mean", "min", "max"] = "sum") -> Tensor:
        reduced = tensor.clone()
        dist.all_reduce(reduced, op=_OPERATIONS[op])
        return reduced / self.num_processes if op == "mean" else reduced

    def gather_object(self, value: T) -> list[T]:
        gathered: list[Any] = [None] * self.num_processes
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def barrier(self) -> None:
        dist.barrier()

    def settle(self) -> None:
        # A gloo thread that lets go of the last collective's tensors takes an interpreter lock for a moment. A worker
        # forked in that moment has the lock, not the thread, and waits for ever (CPython 3.11, 1 fork in thousands).
        time.sleep(_SETTLE_S)

    def prepare(self, model: nn.Module) -> nn.Module:
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return model  # DDP refuses a module without gradients: a frozen teacher, say
        if self.sync_bn and self.device.type == "cuda":
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch has no types
        elif self.sync_bn:
            logger.warning("sync_bn=True has no effect: torch's SyncBatchNorm runs on GPUs only, this is the CPU")
        device_ids = [self.device] if self.device.type == "cuda" else None
        wrapped = DistributedDataParallel(model, device_ids=device_ids, **self.ddp_kwargs)
        if self.comm_hook is not None:
            wrapped.register_comm_hook(*self.comm_hook)
        return wrapped

    def unwrap(self, model: nn.Module) -> nn.Module:
        return model.module if isinstance(model, DistributedDataParallel) else model

    def evaluation_model(self, model: nn.Module) -> nn.Module:
        # DDP's forward broadcasts buffers in eval too and would wait for ranks that have no batch left. The bare
        # module does not; so that all ranks evaluate the same model, buffers are those of rank zero.
        module = self.unwrap(model)
        for buffer in module.buffers():
            dist.broadcast(buffer, src=0)
        return module

    def accumulate(self, model: nn.Module) -> AbstractContextManager[Any]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()
