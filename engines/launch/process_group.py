"""Base of the engines over ``torch.distributed``: launching, process group and collectives."""

from __future__ import annotations

import gc
import logging
import socket
import time
from abc import ABC
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]  # public, though not in torch's __all__
from torch.optim import Optimizer

from runnerkit.engine import EngineOptions, IEngine
from runnerkit.engines.failures.exchange_watch import ExchangeWatch
from runnerkit.engines.failures.failure import no_silent_exit, record
from runnerkit.engines.failures.lockstep import Lockstep
from runnerkit.engines.failures.root_cause import root_cause, tell_early
from runnerkit.engines.failures.watchdog import AgentWatch, is_needed
from runnerkit.engines.launch.message_stream import spawn_rounds
from runnerkit.engines.launch.network import keep_gloo_on_this_machine, tell_gloo_the_interface
from runnerkit.engines.launch.parent import die_with_parent
from runnerkit.engines.launch.rendezvous import open_store
from runnerkit.engines.launch.spawn import spawn
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.loop.stop_signals import Stopped
from runnerkit.support.accelerator import default_device
from runnerkit.support.platform import refuse_windows

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SETTLE_S = 0.005
_MOST_OF = 0.9  # a timeout has passed
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "mean": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


class ProcessGroupOptions(EngineOptions, total=False):
    """Arguments that every engine over ``torch.distributed`` accepts; see :class:`ProcessGroupEngine`."""

    address: str | None
    port: int | None
    backend: str | None
    device: Literal["cuda", "cpu"] | None
    devices: Sequence[int] | None
    timeout_s: float


class ProcessGroupEngine(IEngine, ABC):
    """Base of the engines whose processes form a process group.

    Under plain python or in a notebook it spawns the processes itself; under torchrun, srun or mpirun, or in processes
    that called ``torch.distributed.init_process_group``, it joins the existing ones.

    Args:
        num_processes: None means one per GPU, or 2 without GPUs; a launcher's number overrides it.
        address, port: rendezvous of spawned processes; None means a file on this machine, without a port.
        backend: None means nccl for GPU tensors and gloo for all others, including objects and checkpoints.
        device: "cuda" or "cpu"; None means CUDA GPUs if there are any, else the CPU, also beside other accelerators.
        devices: indices of the GPUs to use, in the order of a machine's processes; None means all, starting at 0.
        timeout_s: seconds after which a process stops waiting for another and fails.
        options: as in IEngine.
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
        devices: Sequence[int] | None = None,
        timeout_s: float = 600,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(**options)
        _check_meeting_point(num_processes, address, port)
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        if device not in (None, "cuda", "cpu"):
            raise ValueError(f"device must be 'cuda', 'cpu' or None, got {device!r}; devices=[...] selects GPUs")
        self._wanted_device = device
        self.devices = _checked_devices(devices, num_processes, device)
        environment = ProcessEnvironment.read()
        self.num_processes = environment.world_size if environment is not None else num_processes or self._num_spawned()
        self.address = address
        self.port = port
        self.backend = backend
        self.timeout_s = timeout_s
        self._owns_group = False
        self._watch: AgentWatch | None = None
        self._store: Store | None = None
        self._lockstep: Lockstep | None = None
        self._exchange = ExchangeWatch(self, compares=True)

    def check(self) -> None:
        refuse_windows("processes that train together")
        super().check()
        device = default_device()
        if self._wanted_device is None and device.type not in ("cpu", "cuda"):
            logger.warning(
                "%s uses the CPU, as training in several processes on %s was never tried: without ddp=True, one "
                'process trains on it; device="cpu" turns this warning off', type(self).__name__, device.type,
            )  # fmt: skip
        if self.devices is not None and not torch.cuda.is_available():
            raise RuntimeError(f"devices={list(self.devices)} are GPUs, but torch sees none; omit devices")
        if self.backend is not None:
            _check_backend(self.backend, uses_cuda=self._uses_cuda())

    def launch(self, fn: Callable[[], T]) -> T:
        self.check()
        environment = ProcessEnvironment.read()
        if environment is not None:
            try:
                with no_silent_exit(environment.rank, environment.world_size):
                    result = fn()
                self._stand_down()
                return result
            except BaseException as error:
                cause = self._root_cause(error)
                if cause is error:
                    raise
                raise cause from cause.__cause__
            finally:
                self.cleanup()
        return spawn(fn, num_processes=self.num_processes, variables=self._meeting_point())

    def stream(self, fn: Callable[[], Generator[T, None, None]]) -> Generator[list[T], None, None]:
        self.check()
        environment = ProcessEnvironment.read()
        if environment is None:
            yield from spawn_rounds(fn, num_processes=self.num_processes, variables=self._meeting_point())
            return
        try:
            with no_silent_exit(environment.rank, environment.world_size):
                yield from self.gather_rounds(fn())
            self._stand_down()
        except GeneratorExit:  # closing the generator early is not a failure
            self._stand_down()
            raise
        finally:
            self.cleanup()

    def record_failure(self, error: BaseException) -> None:
        if isinstance(error, Exception):  # SystemExit and KeyboardInterrupt are requests
            if self._store is not None:
                tell_early(error, store=self._store, rank=self.rank, world_size=self.world_size)
            record(error, rank=self.rank, world_size=self.world_size)

    def _root_cause(self, error: BaseException) -> BaseException:
        if self._store is None or isinstance(error, Stopped):
            return error
        place = {"rank": self.rank, "world_size": self.world_size}
        return root_cause(error, store=self._store, leave=self.cleanup, **place)

    def _stand_down(self) -> None:
        if self._watch is not None:
            self._watch.stand_down()  # not after a failure: then it makes sure that torchrun ends too

    def _num_spawned(self) -> int:
        if self.devices is not None:
            return len(self.devices)
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
                    f"cannot listen on {self.address}:{self.port} ({error.strerror}); another job may use the port: "
                    "choose another, or omit address and port"
                ) from error
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}

    def setup(self) -> None:
        environment = ProcessEnvironment.read()
        assert environment is not None, "call launch() first"
        if environment.launcher in ("torchrun", "mpirun"):
            die_with_parent()  # launchers end their processes, but not if they are killed themselves
        self.process_index = environment.rank
        self.local_process_index = environment.local_rank
        self.num_processes = environment.world_size
        self.open_device(self._choose_device(environment))
        if not dist.is_initialized():
            timeout = timedelta(seconds=self.timeout_s)
            backend = self.backend or ("cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo")
            store = open_store(environment, timeout=timeout)
            if "gloo" in backend and environment.is_on_one_machine:
                keep_gloo_on_this_machine()
            elif "gloo" in backend and environment.address is not None:
                tell_gloo_the_interface(
                    store, rank=environment.rank, world_size=environment.world_size, host=environment.address
                )
            self._open_group(backend, store, timeout)
            self._owns_group = True
            self._store = store
            if environment.is_on_one_machine:  # across machines, the store may become unreachable
                self._lockstep = Lockstep(
                    store, rank=environment.rank, world_size=environment.world_size, timeout_s=self.timeout_s
                )
            self._watch = AgentWatch() if is_needed() else None  # now, as all workers of this machine have started
        elif not self._owns_group:
            _check_given_group(environment)

    def _open_group(self, backend: str, store: Store, timeout: timedelta) -> None:
        """Make the process group; every rank must call this.

        Raises:
            ConnectionError: a rank has ended since it joined the store, or did not call this within `timeout`.
        """
        rank, world_size, began = self.process_index, self.num_processes, time.monotonic()
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

    def _choose_device(self, environment: ProcessEnvironment) -> torch.device:
        if not self._uses_cuda():
            return torch.device("cpu")
        index, count = environment.local_rank, torch.cuda.device_count()
        if self.devices is not None:
            if index >= len(self.devices):
                raise RuntimeError(
                    f"process {index} of this machine lacks a GPU: devices={list(self.devices)} are for "
                    f"{len(self.devices)} processes; start that many"
                )
            index = self.devices[index]
        elif environment.launcher == "srun" and count == 1:
            index = 0  # Slurm can show each task its own GPU only
        if index >= count:
            raise RuntimeError(
                f"process {environment.local_rank} of this machine lacks GPU {index}, as there are only {count}: "
                "start at most that many processes, or pass cpu=True"
            )
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def cleanup(self) -> None:
        super().cleanup()
        self._exchange.close()
        if self._lockstep is not None:
            self._lockstep.close()
        self._lockstep = self._store = None
        if dist.is_initialized():
            self._compiled.clear()
            gc.collect()  # wrapped models hold the group in cycles; its threads must not live until exit
            if self._owns_group:
                dist.destroy_process_group()
            else:
                self.settle()  # the user's script may end next, and a thread that waits for its lock would abort it
        self._owns_group = False

    def reduce(self, tensor: Tensor, op: Literal["sum", "mean", "min", "max"] = "sum") -> Tensor:
        reduced = tensor.clone()
        dist.all_reduce(reduced, op=_OPERATIONS[op])
        return reduced / self.num_processes if op == "mean" else reduced

    def start_sum(self, value: Tensor) -> Callable[[], Tensor]:
        total = value.to(self.device, copy=True) if self.backend == "nccl" else value.clone()
        work: Any = dist.all_reduce(total, async_op=True)  # typed as an optional, which it is without async_op

        def wait() -> Tensor:
            work.wait()
            return total

        return wait

    def gather_object(self, value: T) -> list[T]:
        gathered: list[Any] = [None] * self.num_processes
        dist.all_gather_object(gathered, value)
        return gathered

    def broadcast_object(self, value: T) -> T:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Broadcast the buffers of rank zero, in one message per dtype; every rank must call this."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for buffer in module.buffers():
            by_dtype.setdefault(buffer.dtype, []).append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.flatten() for buffer in buffers])
            dist.broadcast(flat, src=0)
            for buffer, part in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
                buffer.copy_(part.view_as(buffer))

    def barrier(self) -> None:
        dist.barrier()

    def prepare(
        self, models: dict[str, nn.Module], optimizers: dict[str, Optimizer]
    ) -> tuple[dict[str, nn.Module], dict[str, Optimizer]]:
        models, optimizers = super().prepare(models, optimizers)
        self._exchange.open({key: self.trained_module(model) for key, model in models.items()}, optimizers.values())
        return models, optimizers

    @contextmanager
    def training_alone(self, models: Any, optimizers: Any) -> Iterator[dict[str, nn.Module]]:
        with self._exchange.paused(), super().training_alone(models, optimizers) as modules:
            yield modules

    def enter_training_loader(self, position: Callable[[], int]) -> None:
        self._exchange.enter_loader()
        if self._lockstep is not None:
            self._lockstep.enter(position)

    def leave_training_loader(self, num_batches: int, *, key: str) -> None:
        if self._lockstep is not None:
            self._lockstep.leave(num_batches, key=key)

    def settle(self) -> None:
        # A gloo thread briefly holds an interpreter lock while it frees the last collective's tensors. A worker forked
        # at that moment inherits the lock but not the thread, and hangs (CPython 3.11, 1 fork in thousands).
        time.sleep(_SETTLE_S)


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


def _check_backend(backend: str, *, uses_cuda: bool) -> None:
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


def _check_meeting_point(num_processes: int | None, address: str | None, port: int | None) -> None:
    if num_processes is not None and num_processes < 1:
        raise ValueError(f"num_processes must be >= 1, got {num_processes}; pass None for one per GPU")
    if (address is None) != (port is None):
        raise ValueError(f"address and port go together, got address={address!r}, port={port!r}; pass or omit both")


def _checked_devices(
    devices: Sequence[int] | None, num_processes: int | None, device: str | None
) -> tuple[int, ...] | None:
    if devices is None:
        return None
    indices = tuple(devices)
    if device == "cpu":
        raise ValueError(f"devices={list(indices)} are GPUs; omit them with device='cpu'")
    if not indices or len(set(indices)) < len(indices) or min(indices) < 0:
        raise ValueError(f"devices must be different GPU indices >= 0, such as [0, 2], got {list(indices)}")
    if num_processes is not None and num_processes != len(indices):
        raise ValueError(f"num_processes={num_processes}, but {len(indices)} devices: omit num_processes")
    return indices
