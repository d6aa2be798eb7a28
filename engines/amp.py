"""The engines' names with mixed precision: each fixes one constructor argument."""

from typing import Any

import torch

from runnerkit.engines.data_parallel import DataParallelEngine
from runnerkit.engines.ddp import DistributedDataParallelEngine
from runnerkit.engines.device import DeviceEngine
from runnerkit.precision import AMP


class AMPEngine(DeviceEngine):
    """One device, automatic mixed precision.

    Args:
        device: by default the GPU if there is one.
        dtype: fp16 (with a gradient scaler) or bf16; None is fp16 on CUDA, bf16 elsewhere.

    >>> AMPEngine("cpu").precision.dtype is None
    True
    """

    def __init__(self, device: str | torch.device | None = None, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(device, precision=AMP(dtype))


class DataParallelAMPEngine(DataParallelEngine):
    """All GPUs from one process, autocast inside each replica.

    >>> DataParallelAMPEngine(dtype=torch.bfloat16).precision.dtype
    torch.bfloat16
    """

    def __init__(self, device: str | torch.device | None = None, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(device, precision=AMP(dtype))


class DistributedDataParallelAMPEngine(DistributedDataParallelEngine):
    """One process a GPU, automatic mixed precision; other arguments as DistributedDataParallelEngine's.

    >>> DistributedDataParallelAMPEngine(num_processes=2).is_ddp
    True
    """

    def __init__(self, num_processes: int | None = None, *, dtype: torch.dtype | None = None, **kwargs: Any) -> None:
        super().__init__(num_processes, precision=AMP(dtype), **kwargs)
