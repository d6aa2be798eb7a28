"""Base of the engines over ``torch.distributed``: which launcher, which device and which process group they have."""

from __future__ import annotations

import logging
import socket
from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any, Literal, Unpack

import torch
from torch import nn
from torch.optim import Optimizer

from runnerkit.engine import EngineOptions
from runnerkit.engines.communicators.process_group import ProcessGroup, check_backend
from runnerkit.engines.launch.launchers import ExternalLauncher, SpawnLauncher
from runnerkit.engines.launch.parent import die_with_parent
from runnerkit.engines.launch.ray_launcher import RayLauncher
from runnerkit.engines.launch.several_processes import SeveralProcessesEngine
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.job_process import Launcher
from runnerkit.support.accelerator import get_device

logger = logging.getLogger(__name__)


class ProcessGroupOptions(EngineOptions, total=False):
    """Arguments that every engine over ``torch.distributed`` accepts; see :class:`ProcessGroupEngine`."""

    address: str | None
    port: int | None
    backend: str | None
    device: Literal["cuda", "cpu"] | None
    devices: Sequence[int] | None
    timeout_s: float
    launcher: RayLauncher | None


class ProcessGroupEngine(SeveralProcessesEngine, ABC):
    """Base of the engines whose processes form a process group.

    Under plain python or in a notebook it spawns the processes itself; under torchrun, srun or mpirun, or in processes
    that called ``torch.distributed.init_process_group``, it joins the existing ones.

    Args:
        num_processes: None means one per GPU, or 2 without GPUs. With `launcher`, (least, most) starts as many as there
            is room for. The number of torchrun, srun or mpirun overrides it.
        address, port: rendezvous of spawned processes; None means a file on this machine, without a port.
        backend: None means nccl for GPU tensors and gloo for all others, including objects and checkpoints.
        device: "cuda" or "cpu"; None means CUDA GPUs if there are any, else the CPU, also beside other accelerators.
        devices: indices of the GPUs to use, in the order of a machine's processes; None means all, starting at 0.
        timeout_s: seconds after which a process stops waiting for another and fails.
        launcher: starts the processes elsewhere than on this machine; it needs num_processes. Under torchrun, srun or
            mpirun it is not used.
        options: as in IEngine.

    Attributes:
        bounds: least and largest number of processes, as they were asked for; None if this machine decides.
    """

    communicator: ProcessGroup

    def __init__(
        self,
        num_processes: int | tuple[int, int] | None = None,
        *,
        address: str | None = None,
        port: int | None = None,
        backend: str | None = None,
        device: Literal["cuda", "cpu"] | None = None,
        devices: Sequence[int] | None = None,
        timeout_s: float = 600,
        launcher: RayLauncher | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(**options)
        _check_meeting_point(address, port)
        self.bounds = _bounds_of(num_processes)
        _check_launcher(launcher, self.bounds, address)
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be > 0, got {timeout_s}")
        if device not in (None, "cuda", "cpu"):
            raise ValueError(f"device must be 'cuda', 'cpu' or None, got {device!r}; devices=[...] selects GPUs")
        self._wanted_device = device
        self.devices = _checked_devices(devices, self.bounds, device)
        environment = ProcessEnvironment.read()
        wanted = self.bounds[1] if self.bounds is not None else self._num_spawned()
        self.num_processes = environment.world_size if environment is not None else wanted
        self.address = address
        self.port = port
        self.backend = backend
        self.timeout_s = timeout_s
        self._given_launcher = launcher
        self.communicator = ProcessGroup()

    def check(self) -> None:
        super().check()
        if self._given_launcher is not None:
            self._given_launcher.check()
        device = get_device()
        if self._wanted_device is None and device.type not in ("cpu", "cuda"):
            logger.warning(
                "%s uses the CPU, as training in several processes on %s was never tried: without ddp=True, one "
                'process trains on it; device="cpu" turns this warning off', type(self).__name__, device.type,
            )  # fmt: skip
        if self.devices is not None and not torch.cuda.is_available():
            raise RuntimeError(f"devices={list(self.devices)} are GPUs, but torch sees none; omit devices")
        if self.backend is not None:
            check_backend(self.backend, uses_cuda=self._uses_cuda())

    def launcher(self) -> Launcher:
        environment = ProcessEnvironment.read()
        if environment is not None:
            return ExternalLauncher(self, environment)
        if self._given_launcher is not None:
            assert self.bounds is not None
            may_use_gpus = self._wanted_device != "cpu"
            return self._given_launcher.of(self, self.bounds, may_use_gpus=may_use_gpus, timeout_s=self.timeout_s)
        return SpawnLauncher(self.num_processes, variables=self._meeting_point())

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
        backend, timeout_s = self.backend, self.timeout_s
        store = self.communicator.open(environment, device=self.device, backend=backend, timeout_s=timeout_s)
        if store is not None:
            self.watch_others(store, environment, timeout_s=timeout_s)

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
        self._compiled.clear()  # these models hold the group
        self.communicator.close()

    def broadcast_buffers(self, module: nn.Module) -> None:
        """Broadcast the buffers of rank zero, in one message per dtype; every rank must call this."""
        self.communicator.broadcast_tensors([*module.buffers()])

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


def _bounds_of(num_processes: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if num_processes is None:
        return None
    # A config has lists.
    bounds: Sequence[int] = num_processes if isinstance(num_processes, tuple | list) else (num_processes, num_processes)
    if not all(isinstance(each, Integral) and not isinstance(each, bool) for each in bounds):
        raise TypeError(f"num_processes must be an integer, or (least, most) with launcher=, got {num_processes!r}")
    if bounds is not num_processes and bounds[0] < 1:
        raise ValueError(f"num_processes must be >= 1, got {num_processes}; pass None for one per GPU")
    if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
        raise ValueError(
            f"num_processes must be a number, or (least, most) with 1 <= least <= most, got {num_processes}"
        )
    return int(bounds[0]), int(bounds[1])


def _check_meeting_point(address: str | None, port: int | None) -> None:
    if (address is None) != (port is None):
        raise ValueError(f"address and port go together, got address={address!r}, port={port!r}; pass or omit both")


def _check_launcher(launcher: RayLauncher | None, bounds: tuple[int, int] | None, address: str | None) -> None:
    if launcher is None:
        if bounds is not None and bounds[0] < bounds[1]:
            raise ValueError(f"num_processes={bounds} needs launcher=, which chooses the number; pass one number")
        return
    if not hasattr(launcher, "of"):
        raise TypeError(f"launcher must be None or a RayLauncher, got {launcher!r}")
    if bounds is None:
        raise ValueError("launcher= needs num_processes=, the number of processes in the cluster")
    if address is not None:
        raise ValueError("address and port are chosen by launcher=: omit them")


def _checked_devices(
    devices: Sequence[int] | None, bounds: tuple[int, int] | None, device: str | None
) -> tuple[int, ...] | None:
    if devices is None:
        return None
    indices = tuple(devices)
    if device == "cpu":
        raise ValueError(f"devices={list(indices)} are GPUs; omit them with device='cpu'")
    if not indices or len(set(indices)) < len(indices) or min(indices) < 0:
        raise ValueError(f"devices must be different GPU indices >= 0, such as [0, 2], got {list(indices)}")
    if bounds is not None and bounds != (len(indices), len(indices)):
        raise ValueError(f"num_processes={bounds[1]}, but {len(indices)} devices: omit num_processes")
    return indices
