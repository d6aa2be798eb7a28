"""Mixed-precision variants of the engines: each fixes the `precision` argument."""

from __future__ import annotations

from typing import Any, Unpack

import torch

from runnerkit.engine import EngineOptions
from runnerkit.engines.data_parallel import DataParallelEngine
from runnerkit.engines.ddp import DistributedDataParallelEngine, DistributedDataParallelOptions
from runnerkit.engines.device import DeviceEngine
from runnerkit.engines.fsdp import FullyShardedDataParallelEngine, FullyShardedDataParallelOptions
from runnerkit.engines.horovod import HorovodEngine, HorovodOptions
from runnerkit.precision import AMP

__all__ = [
    "AMPEngine",
    "DataParallelAMPEngine",
    "DistributedDataParallelAMPEngine",
    "FullyShardedDataParallelAMPEngine",
    "HorovodAMPEngine",
]


def with_amp(options: Any, dtype: torch.dtype | None) -> Any:
    """Add AMP, as the engine's name promises, to its options.

    Raises:
        TypeError: the options contain a precision.
    """
    if "precision" in options:
        raise TypeError(
            "this engine's name fixes its precision; pass dtype=, or use the engine without AMP in its name"
        )
    return {**options, "precision": AMP(dtype)}


class AMPEngine(DeviceEngine):
    """One device with automatic mixed precision.

    Args:
        device: defaults to the GPU if there is one.
        dtype: fp16 (with a gradient scaler) or bf16; None means bf16, or fp16 on CUDA GPUs that only
            emulate it.

    >>> AMPEngine("cpu").precision.dtype is None
    True
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(device, **with_amp(options, dtype))


class DataParallelAMPEngine(DataParallelEngine):
    """All GPUs in one process, autocast in each replica; `dtype` as in AMPEngine, the rest as in DataParallelEngine.

    >>> DataParallelAMPEngine(dtype=torch.bfloat16).precision.dtype
    torch.bfloat16
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__(device, **with_amp(options, dtype))


class DistributedDataParallelAMPEngine(DistributedDataParallelEngine):
    """One process per GPU, mixed precision; `dtype` as in AMPEngine, the rest as in DistributedDataParallelEngine.

    >>> DistributedDataParallelAMPEngine(num_processes=2).is_ddp
    True
    """

    def __init__(
        self,
        num_processes: int | tuple[int, int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[DistributedDataParallelOptions],
    ) -> None:
        super().__init__(num_processes, **with_amp(options, dtype))


class FullyShardedDataParallelAMPEngine(FullyShardedDataParallelEngine):
    """Sharded over processes, automatic mixed precision; `dtype` as in AMPEngine, the rest as in
    FullyShardedDataParallelEngine.

    Weights are gathered in float32 and cast where they are used. Autocast keeps the 16-bit copies for backward, so
    resharding after forward saves little. To save memory, use FullyShardedDataParallelEngine with
    compute_dtype=torch.bfloat16, which gathers half the bytes and keeps no copies.

    >>> FullyShardedDataParallelAMPEngine(num_processes=2, dtype=torch.bfloat16).precision.dtype
    torch.bfloat16
    """

    def __init__(
        self,
        num_processes: int | tuple[int, int] | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[FullyShardedDataParallelOptions],
    ) -> None:
        super().__init__(num_processes, **with_amp(options, dtype))


class HorovodAMPEngine(HorovodEngine):
    """Horovod with automatic mixed precision; `dtype` as in AMPEngine, the rest as in HorovodEngine.

    >>> HorovodAMPEngine(num_processes=2).is_ddp
    True
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[HorovodOptions],
    ) -> None:
        super().__init__(num_processes, **with_amp(options, dtype))
