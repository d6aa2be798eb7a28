# Written by scripts/public_names.py from the __all__ of each file: run `make format`.
from runnerkit.engine import IEngine as IEngine
from runnerkit.engines.adapters.apex_precision import Apex as Apex
from runnerkit.engines.adapters.float8 import Float8 as Float8
from runnerkit.engines.amp import AMPEngine as AMPEngine
from runnerkit.engines.amp import DataParallelAMPEngine as DataParallelAMPEngine
from runnerkit.engines.amp import DistributedDataParallelAMPEngine as DistributedDataParallelAMPEngine
from runnerkit.engines.amp import FullyShardedDataParallelAMPEngine as FullyShardedDataParallelAMPEngine
from runnerkit.engines.amp import HorovodAMPEngine as HorovodAMPEngine
from runnerkit.engines.apex import APEXEngine as APEXEngine
from runnerkit.engines.apex import DataParallelAPEXEngine as DataParallelAPEXEngine
from runnerkit.engines.apex import DistributedDataParallelAPEXEngine as DistributedDataParallelAPEXEngine
from runnerkit.engines.apex import HorovodAPEXEngine as HorovodAPEXEngine
from runnerkit.engines.by_name import choose_engine as choose_engine
from runnerkit.engines.choose import get_available_engine as get_available_engine
from runnerkit.engines.data_parallel import DataParallelEngine as DataParallelEngine
from runnerkit.engines.ddp import DistributedDataParallelEngine as DistributedDataParallelEngine
from runnerkit.engines.device import CPUEngine as CPUEngine
from runnerkit.engines.device import DeviceEngine as DeviceEngine
from runnerkit.engines.device import GPUEngine as GPUEngine
from runnerkit.engines.failures.failure import RankTraceback as RankTraceback
from runnerkit.engines.failures.failure import WorkerError as WorkerError
from runnerkit.engines.fsdp import FullyShardedDataParallelEngine as FullyShardedDataParallelEngine
from runnerkit.engines.horovod import HorovodEngine as HorovodEngine
from runnerkit.engines.launch.ray_launcher import RayLauncher as RayLauncher

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
    "Float8",
    "FullyShardedDataParallelAMPEngine",
    "FullyShardedDataParallelEngine",
    "GPUEngine",
    "HorovodAMPEngine",
    "HorovodAPEXEngine",
    "HorovodEngine",
    "IEngine",
    "RankTraceback",
    "RayLauncher",
    "WorkerError",
    "choose_engine",
    "get_available_engine",
]
