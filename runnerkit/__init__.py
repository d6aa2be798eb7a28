"""You write what happens to a batch; runnerkit runs it on any engine, exactly and at no cost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from runnerkit.late_names import late_names
from runnerkit.version import __version__

if TYPE_CHECKING:
    from runnerkit.callback import Callback, CallbackNode, CallbackOrder
    from runnerkit.curves.best_values import best_metrics, compare_runs
    from runnerkit.curves.history import read_metrics
    from runnerkit.curves.plot import plot_metrics
    from runnerkit.curves.report import write_report
    from runnerkit.engine import IEngine
    from runnerkit.engines import (
        AMPEngine,
        APEXEngine,
        CPUEngine,
        DataParallelAMPEngine,
        DataParallelAPEXEngine,
        DataParallelEngine,
        DeviceEngine,
        DistributedDataParallelAMPEngine,
        DistributedDataParallelAPEXEngine,
        DistributedDataParallelEngine,
        FullyShardedDataParallelAMPEngine,
        FullyShardedDataParallelEngine,
        GPUEngine,
        HorovodAMPEngine,
        HorovodAPEXEngine,
        HorovodEngine,
    )
    from runnerkit.logger import ILogger
    from runnerkit.runner import IRunner
    from runnerkit.supervised import SupervisedRunner
    from runnerkit.train import Runner
else:  # the command line completes words, and prints its help, without torch
    __getattr__, __dir__ = late_names(
        __name__,
        {
            "curves.best_values": ("best_metrics", "compare_runs"),
            "callback": ("Callback", "CallbackNode", "CallbackOrder"),
            "engine": ("IEngine",),
            "engines": (
                "AMPEngine",
                "APEXEngine",
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
            ),
            "curves.history": ("read_metrics",),
            "logger": ("ILogger",),
            "curves.plot": ("plot_metrics",),
            "curves.report": ("write_report",),
            "runner": ("IRunner",),
            "supervised": ("SupervisedRunner",),
            "train": ("Runner",),
        },
        packages=("callbacks", "contrib", "data", "dl", "engines", "loggers", "utils"),
    )

__all__ = [
    "AMPEngine",
    "APEXEngine",
    "CPUEngine",
    "Callback",
    "CallbackNode",
    "CallbackOrder",
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
    "ILogger",
    "IRunner",
    "Runner",
    "SupervisedRunner",
    "__version__",
    "best_metrics",
    "compare_runs",
    "plot_metrics",
    "read_metrics",
    "write_report",
]
