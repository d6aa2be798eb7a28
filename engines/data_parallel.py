"""Several GPUs in one process: each forward pass splits the batch over them (``torch.nn.DataParallel``)."""

from __future__ import annotations

from typing import Any, Unpack

import torch
from torch import nn

from runnerkit.engine import EngineOptions
from runnerkit.engines.launch.single_process import SingleProcessEngine
from runnerkit.models.parameters import check_shapes
from runnerkit.precision import FP32, Precision

__all__ = ["DataParallelEngine"]


class DataParallelEngine(SingleProcessEngine):
    """All GPUs of this machine in one process; without GPUs the model runs unchanged.

    DistributedDataParallelEngine is faster; this engine does not start further processes.

    Args:
        device: the GPU that holds the model and gathers the outputs of the others, such as "cuda:1"; on "cpu" the model
            runs unchanged.
        options: as in IEngine.
    Raises:
        ValueError: ``compile``, which does not support a module that is copied in every step.

    >>> DataParallelEngine().num_processes
    1
    """

    def __init__(self, device: str | torch.device | None = None, **options: Unpack[EngineOptions]) -> None:
        super().__init__(device, **options)
        if self.compile_arguments is not None or self.regions.compiled:
            raise ValueError(
                "DataParallel copies its module in every step, which torch.compile does not support: use "
                "DistributedDataParallelEngine(compile=...)"
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        # Replicas run in threads, and the main thread's autocast does not apply to them.
        inner = model if isinstance(self.precision, FP32) else _AutocastForward(model, self.precision)
        return split_batches(inner, self.device)

    def unwrap(self, model: nn.Module) -> nn.Module:
        while isinstance(model, nn.DataParallel | _AutocastForward):
            model = model.module
        return model


def split_batches(module: nn.Module, device: torch.device) -> nn.Module:
    """Wrap `module`, which is on `device`, so that each batch is split over all GPUs."""
    if device.type != "cuda":
        return module
    first = torch.cuda.current_device() if device.index is None else device.index
    others = [index for index in range(torch.cuda.device_count()) if index != first]
    if others:
        check_shapes(module, "DataParallel")
    return nn.DataParallel(module, device_ids=[first, *others])


class _AutocastForward(nn.Module):
    """A module whose forward pass enters autocast in the thread that runs it."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self.precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision.autocast():
            return self.module(*args, **kwargs)
