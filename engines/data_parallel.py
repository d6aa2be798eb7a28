"""One process, several GPUs: each forward pass splits the batch over them (``torch.nn.DataParallel``)."""

from typing import Any, Unpack

import torch
from torch import nn

from runnerkit.engine import EngineOptions
from runnerkit.engines.single_process import SingleProcessEngine
from runnerkit.precision import FP32, Precision


class DataParallelEngine(SingleProcessEngine):
    """Train on all GPUs of this machine from one process; without GPUs the model runs as it is.

    DistributedDataParallelEngine is faster; this one needs no further processes.

    >>> DataParallelEngine().num_processes
    1
    """

    def __init__(self, device: str | torch.device | None = None, **options: Unpack[EngineOptions]) -> None:
        super().__init__(device, **options)
        if self.compile_arguments is not None:
            raise ValueError(
                "DataParallel copies its module in every step, which torch.compile cannot follow: use "
                "DistributedDataParallelEngine(compile=...)"
            )

    def wrap(self, model: nn.Module) -> nn.Module:
        # Replicas run in threads, which do not see the autocast that the main thread entered.
        inner = model if isinstance(self.precision, FP32) else _AutocastForward(model, self.precision)
        return nn.DataParallel(inner)

    def unwrap(self, model: nn.Module) -> nn.Module:
        while isinstance(model, nn.DataParallel | _AutocastForward):
            model = model.module
        return model


class _AutocastForward(nn.Module):
    """A module whose forward pass enters autocast in the thread that runs it."""

    def __init__(self, module: nn.Module, precision: Precision) -> None:
        super().__init__()
        self.module = module
        self.precision = precision

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision.autocast():
            return self.module(*args, **kwargs)
