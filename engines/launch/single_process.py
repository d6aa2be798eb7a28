"""Base of the engines that train in the calling process."""

from __future__ import annotations

import logging
from typing import Any, Unpack

import torch

from runnerkit.engine import EngineOptions, IEngine
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.job_process import Launcher
from runnerkit.support.accelerator import get_device, is_missing

logger = logging.getLogger(__name__)


class SingleProcessEngine(IEngine):
    """Base of the engines that train in the calling process.

    Args:
        device: name of the device; None means the GPU (CUDA, MPS or XPU) if there is one, else the CPU.
        options: as in IEngine.
    """

    def __init__(self, device: str | torch.device | None = None, **options: Unpack[EngineOptions]) -> None:
        super().__init__(**options)
        self._wanted_device = device
        self._device_before: int | None = None
        self._switched: Any = None  # the module of torch, such as torch.cuda, that has another current device

    def check(self) -> None:
        super().check()
        self._choose_device()

    def launcher(self) -> Launcher:
        environment = ProcessEnvironment.read()
        if environment is not None and environment.world_size > 1:
            logger.warning(
                "%s started %d processes, but %s uses one: each trains separately; pass ddp=True to train together",
                environment.launcher, environment.world_size, type(self).__name__,
            )  # fmt: skip
        return super().launcher()

    def _choose_device(self) -> torch.device:
        device = get_device() if self._wanted_device is None else torch.device(self._wanted_device)
        if is_missing(device):
            of_type = "" if device.type == "cuda" else f" of type {device.type!r}"
            raise RuntimeError(
                f"{type(self).__name__} needs a GPU{of_type} and torch sees none; use CPUEngine() or cpu=True"
            )
        return device

    def setup(self) -> None:
        device = self._choose_device()
        if device.index is not None and device.type in ("cuda", "xpu"):
            # Tensors that users or libraries create on "cuda" without an index belong there too.
            self._switched = torch.get_device_module(device)
            self._device_before = self._switched.current_device()
            self._switched.set_device(device)
        self.open_device(device)

    def cleanup(self) -> None:
        super().cleanup()
        if self._device_before is not None:
            self._switched.set_device(self._device_before)
            self._device_before = None
