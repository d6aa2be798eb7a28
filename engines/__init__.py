"""Where a run runs: one class for each kind of parallelism, each holding a precision."""

from __future__ import annotations

if __name__ != "runnerkit.engines":
    raise ImportError("this folder is the package runnerkit.engines: write `import runnerkit.engines`")

from runnerkit.engine import IEngine
from runnerkit.engines.amp import (
    AMPEngine,
    DataParallelAMPEngine,
    DistributedDataParallelAMPEngine,
    FullyShardedDataParallelAMPEngine,
    HorovodAMPEngine,
)
from runnerkit.engines.apex import (
    APEXEngine,
    DataParallelAPEXEngine,
    DistributedDataParallelAPEXEngine,
    HorovodAPEXEngine,
)
from runnerkit.engines.apex_precision import Apex
from runnerkit.engines.choose import choose_engine, get_available_engine
from runnerkit.engines.data_parallel import DataParallelEngine
from runnerkit.engines.ddp import DistributedDataParallelEngine
from runnerkit.engines.device import CPUEngine, DeviceEngine, GPUEngine
from runnerkit.engines.failure import RankTraceback, WorkerError
from runnerkit.engines.fsdp import FullyShardedDataParallelEngine
from runnerkit.engines.horovod import HorovodEngine

__all__ = [
    "AMPEngine",
    "APEXEngine",
    "Apex",
    "CPUEngine",
    "DataParallelAMPEngine",
    "DataParallelAPEXEngine",
    "DataParallelEngine",
    "DeviceEngine",
    "DistributedDataParallelAMPEngine",
    "DistributedDataParallelAPEXEngine",
    "DistributedDataParallelEngine",
    "FullyShardedDataParallelAMPEngine",
    "FullyShardedDataParallelEngine",
    "GPUEngine",
    "HorovodAMPEngine",
    "HorovodAPEXEngine",
    "HorovodEngine",
    "IEngine",
    "RankTraceback",
    "WorkerError",
    "choose_engine",
    "get_available_engine",
]
