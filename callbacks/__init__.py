"""What happens around a batch: each callback is one page, and says in its order when it acts."""

if __name__ != "runnerkit.callbacks":
    raise ImportError("this folder is the package runnerkit.callbacks: write `import runnerkit.callbacks`")

from runnerkit.callback import (
    Callback,
    CallbackNode,
    CallbackOrder,
    IBackwardCallback,
    ICallback,
    ICheckpointCallback,
    ICriterionCallback,
    IMetricCallback,
    IOptimizerCallback,
    ISchedulerCallback,
)
from runnerkit.callbacks.accuracy import AccuracyCallback
from runnerkit.callbacks.backward import BackwardCallback
from runnerkit.callbacks.check_run import CheckRunCallback
from runnerkit.callbacks.checkpoint import CheckpointCallback
from runnerkit.callbacks.control_flow import CallbackWrapper, ControlFlowCallback
from runnerkit.callbacks.criterion import CriterionCallback
from runnerkit.callbacks.early_stop import EarlyStoppingCallback
from runnerkit.callbacks.lr_scale import LRScaleCallback
from runnerkit.callbacks.metric import BatchMetricCallback, FunctionalBatchMetricCallback, LoaderMetricCallback
from runnerkit.callbacks.metric_aggregation import MetricAggregationCallback
from runnerkit.callbacks.optimizer import OptimizerCallback
from runnerkit.callbacks.overfit import BatchOverfitCallback
from runnerkit.callbacks.periodic_loader import PeriodicLoaderCallback
from runnerkit.callbacks.profiler import ProfilerCallback
from runnerkit.callbacks.progress import TqdmCallback
from runnerkit.callbacks.scheduler import SchedulerCallback
from runnerkit.callbacks.timer import TimerCallback
from runnerkit.callbacks.verify_ranks import VerifyRanksCallback

__all__ = [
    "AccuracyCallback",
    "BackwardCallback",
    "BatchMetricCallback",
    "BatchOverfitCallback",
    "Callback",
    "CallbackNode",
    "CallbackOrder",
    "CallbackWrapper",
    "CheckRunCallback",
    "CheckpointCallback",
    "ControlFlowCallback",
    "CriterionCallback",
    "EarlyStoppingCallback",
    "FunctionalBatchMetricCallback",
    "IBackwardCallback",
    "ICallback",
    "ICheckpointCallback",
    "ICriterionCallback",
    "IMetricCallback",
    "IOptimizerCallback",
    "ISchedulerCallback",
    "LRScaleCallback",
    "LoaderMetricCallback",
    "MetricAggregationCallback",
    "OptimizerCallback",
    "PeriodicLoaderCallback",
    "ProfilerCallback",
    "SchedulerCallback",
    "TimerCallback",
    "TqdmCallback",
    "VerifyRanksCallback",
]
