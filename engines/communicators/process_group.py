"""Communication through a process group of ``torch.distributed``."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in torch's __all__

from runnerkit.communicator import Communicator, ReduceOp
from runnerkit.engines.launch.network import set_gloo_interface, set_gloo_loopback
from runnerkit.engines.launch.rendezvous import open_store
from runnerkit.engines.process_environment import ProcessEnvironment

T = TypeVar("T")

_MOST_OF = 0.9  # a timeout has passed
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class ProcessGroup(Communicator):
    """The default process group, which :meth:`open` makes unless the user has called ``init_process_group``."""

    def __init__(self) -> None:
        self._owns_group = False
        self._only_on: torch.device | None = None  # nccl sends tensors of its GPU only

    def open(
        self, environment: ProcessEnvironment, *, device: torch.device, backend: str | None, timeout_s: float
    ) -> Store | None:
        """Make the process group or use the user's; every rank must call this.

        Args:
            device: of this process; without `backend`, it chooses one.
            timeout_s: seconds after which a process stops waiting for another.
        Returns:
            The store of the group if this made it, else None.
        Raises:
            ConnectionError: see :meth:`_make_group`.
            ValueError: the user's group has another rank or world size than the launcher's job.
        """
        is_open = dist.is_initialized()
        self._only_on = device if (dist.get_backend() if is_open else backend) == "nccl" else None
        if is_open:
            if not self._owns_group:
                _check_given_group(environment)
            return None
        rank, world_size, timeout = environment.rank, environment.world_size, timedelta(seconds=timeout_s)
        backend = backend or ("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
        store = open_store(environment, timeout=timeout)
        if "gloo" in backend and environment.is_on_one_machine:
            set_gloo_loopback()
        elif "gloo" in backend and environment.address is not None:
            set_gloo_interface(store, rank=rank, world_size=world_size, host=environment.address)
        self._make_group(backend, store, timeout, rank=rank, world_size=world_size)
        self._owns_group = True
        return store

    def _make_group(self, backend: str, store: Store, timeout: timedelta, *, rank: int, world_size: int) -> None:
        """Make the process group; every rank must call this.

        Raises:
            ConnectionError: a rank has ended since it joined the store, or did not call this within `timeout`.
        """
        began = time.monotonic()
        store.set(_here(rank), "")
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        except RuntimeError as error:
            where = f"rank {rank} of {world_size} cannot make the process group"
            try:
                missing = [str(each) for each in range(world_size) if not store.check([_here(each)])]
            except RuntimeError:
                raise ConnectionError(f"{where}: rank 0, which serves the job's store, has ended") from error
            if not missing or time.monotonic() - began < _MOST_OF * timeout.total_seconds():
                raise  # not for a rank that is late
            raise ConnectionError(
                f"{where}: rank {', '.join(missing)} is missing after {timeout.total_seconds():g} s; it has ended, and "
                "its output says why, or it is slow: the engine's timeout_s= sets this limit"
            ) from error

    def close(self) -> None:
        """Destroy the group if :meth:`open` made it; safe to call twice."""
        if dist.is_initialized():
            gc.collect()  # wrapped models hold the group in cycles; its threads must not live until exit
            if self._owns_group:
                dist.destroy_process_group()
            else:
                self.settle()  # the user's script may end next, and a thread that waits for its lock would abort it
        self._owns_group = False

    def reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> Tensor:
        reduced = tensor.clone()
        dist.all_reduce(reduced, op=_OPERATIONS[op])
        return reduced / dist.get_world_size() if op == "mean" else reduced

    def start_sum(self, value: Tensor) -> Callable[[], Tensor]:
        total = value.clone() if self._only_on is None else value.to(self._only_on, copy=True)
        work: Any = dist.all_reduce(total, async_op=True)  # typed as an optional, which it is without async_op

        def wait() -> Tensor:
            work.wait()
            return total

        return wait

    def gather(self, value: T) -> list[T]:
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def broadcast_tensors(self, tensors: Sequence[Tensor]) -> None:
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        for alike in by_dtype.values():  # one message per dtype
            flat = torch.cat([tensor.flatten() for tensor in alike])
            dist.broadcast(flat, src=0)
            for tensor, part in zip(alike, torch.split(flat, [tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def barrier(self) -> None:
        dist.barrier()


def check_backend(backend: str, *, uses_cuda: bool) -> None:
    """Raise if torch was built without this backend, or if the backend cannot send CPU tensors and the run is on CPU.

    Args:
        backend: as in torch: "gloo", or by device: "cpu:gloo,cuda:nccl".
    """
    names = {part.rpartition(":")[2].lower() for part in backend.split(",")}
    built = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}
    missing = sorted(name for name in names if name in built and not built[name]())
    if missing:
        raise RuntimeError(
            f"backend={backend!r} needs {missing[0].upper()}, but this torch ({torch.__version__}) was built without "
            "it; omit backend, which uses gloo on the CPU, or install a torch that has it"
        )
    if names == {"nccl"} and not uses_cuda:
        raise RuntimeError(
            f"backend={backend!r} sends GPU tensors only, but this run is on the CPU; omit backend, which uses gloo "
            "there"
        )


def _here(rank: int) -> str:
    return f"runnerkit/here/{rank}"


def _check_given_group(environment: ProcessEnvironment) -> None:
    """Raise if the user's process group gives this process another rank or world size than the launcher's job."""
    given, launched = (dist.get_rank(), dist.get_world_size()), (environment.rank, environment.world_size)
    if given != launched:
        raise ValueError(
            f"init_process_group made this process rank {given[0]} of {given[1]}, but {environment.launcher} rank "
            f"{launched[0]} of {launched[1]}: unset RANK and WORLD_SIZE, or leave init_process_group to the engine"
        )
