"""The engines' names with mixed precision: each fixes one constructor argument."""

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


def with_amp(options: Any, dtype: torch.dtype | None) -> Any:
    """Add the precision that a name promises to an engine's options.

    Raises:
        TypeError: another precision is among them.
    """
    if "precision" in options:
        raise TypeError(
            "this engine's name fixes its precision; pass dtype=, or take the engine without AMP in its name"
        )
    return {**options, "precision": AMP(dtype)}


class AMPEngine(DeviceEngine):
    """One device, automatic mixed precision.

    Args:
        device: by default the GPU if there is one.
        dtype: fp16 (with a gradient scaler) or bf16; None is fp16 on CUDA, bf16 elsewhere.

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
    """All GPUs from one process, autocast in each replica; `dtype` as AMPEngine's, the rest as DataParallelEngine's.

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
    """One process a GPU, mixed precision; `dtype` as AMPEngine's, the rest as DistributedDataParallelEngine's.

    >>> DistributedDataParallelAMPEngine(num_processes=2).is_ddp
    True
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[DistributedDataParallelOptions],
    ) -> None:
        super().__init__(num_processes, **with_amp(options, dtype))


class FullyShardedDataParallelAMPEngine(FullyShardedDataParallelEngine):
    """Sharded over processes, automatic mixed precision; `dtype` as AMPEngine's, the rest as
    FullyShardedDataParallelEngine's.

    Weights travel in float32 and are cast where they are used. Autocast keeps those 16-bit copies for backward, so that
    resharding after forward saves little: to save memory take FullyShardedDataParallelEngine with
    compute_dtype=torch.bfloat16, which gathers half the bytes and keeps none of them.

    >>> FullyShardedDataParallelAMPEngine(num_processes=2, dtype=torch.bfloat16).precision.dtype
    torch.bfloat16
    """

    def __init__(
        self,
        num_processes: int | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: Unpack[FullyShardedDataParallelOptions],
    ) -> None:
        super().__init__(num_processes, **with_amp(options, dtype))


class HorovodAMPEngine(HorovodEngine):
    """Horovod's processes, automatic mixed precision; `dtype` as AMPEngine's, the rest as HorovodEngine's.

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
