"""Engines for one process on one device."""

from __future__ import annotations

from typing import Unpack

from torch import nn

from runnerkit.engine import EngineOptions, uncompiled
from runnerkit.engines.launch.single_process import SingleProcessEngine
from runnerkit.support.accelerator import gpu_type

__all__ = ["CPUEngine", "DeviceEngine", "GPUEngine"]


class DeviceEngine(SingleProcessEngine):
    """One device, given by name.

    >>> engine = DeviceEngine("cpu")
    >>> engine.setup()
    >>> engine
    DeviceEngine(device='cpu', rank=0, world_size=1)
    """

    def wrap(self, model: nn.Module) -> nn.Module:
        return self.compiled(model)

    def unwrap(self, model: nn.Module) -> nn.Module:
        return uncompiled(model)


class CPUEngine(DeviceEngine):
    """The CPU.

    >>> CPUEngine().is_ddp
    False
    """

    def __init__(self, **options: Unpack[EngineOptions]) -> None:
        super().__init__("cpu", **options)


class GPUEngine(DeviceEngine):
    """One GPU of the type that torch is built for: CUDA (also ROCm), MPS or XPU.

    Args:
        index: index of the GPU; defaults to torch's current one.

    >>> GPUEngine(index=1).num_processes
    1
    """

    def __init__(self, index: int | None = None, **options: Unpack[EngineOptions]) -> None:
        super().__init__(gpu_type() if index is None else f"{gpu_type()}:{index}", **options)
