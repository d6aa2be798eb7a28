"""What happens around a batch: each callback is one page, and says in its order when it acts."""

from __future__ import annotations

if __name__ != "runnerkit.callbacks":
    raise ImportError("this folder is the package runnerkit.callbacks: write `import runnerkit.callbacks`")

from typing import TYPE_CHECKING

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
from runnerkit.callbacks.batch_transform import BatchTransformCallback
from runnerkit.callbacks.check_run import CheckRunCallback
from runnerkit.callbacks.checkpoint import CheckpointCallback
from runnerkit.callbacks.criterion import CriterionCallback
from runnerkit.callbacks.early_stop import EarlyStoppingCallback
from runnerkit.callbacks.hang import HangCallback
from runnerkit.callbacks.lr_scale import LRScaleCallback
from runnerkit.callbacks.non_finite import NonFiniteCallback
from runnerkit.callbacks.optimizer import OptimizerCallback
from runnerkit.callbacks.overfit import BatchOverfitCallback
from runnerkit.callbacks.profiler import ProfilerCallback
from runnerkit.callbacks.progress import TqdmCallback
from runnerkit.callbacks.scheduler import SchedulerCallback
from runnerkit.callbacks.timer import TimerCallback
from runnerkit.late_names import late_names

if TYPE_CHECKING:
    from runnerkit.callbacks.auc import AUCCallback
    from runnerkit.callbacks.batch_size_finder import BatchSizeFinder
    from runnerkit.callbacks.cmc_score import CMCScoreCallback
    from runnerkit.callbacks.confusion_matrix import ConfusionMatrixCallback
    from runnerkit.callbacks.control_flow import CallbackWrapper, ControlFlowCallback
    from runnerkit.callbacks.dashboard import RichDashboardCallback
    from runnerkit.callbacks.ema import EMACallback
    from runnerkit.callbacks.export import OnnxCallback, QuantizationCallback, TracingCallback
    from runnerkit.callbacks.freeze import FreezeCallback
    from runnerkit.callbacks.gradient_norm import GradNormCallback
    from runnerkit.callbacks.lr_finder import LRFinder
    from runnerkit.callbacks.metric import BatchMetricCallback, FunctionalBatchMetricCallback, LoaderMetricCallback
    from runnerkit.callbacks.metric_aggregation import MetricAggregationCallback
    from runnerkit.callbacks.model_summary import ModelSummaryCallback
    from runnerkit.callbacks.multilabel_accuracy import MultilabelAccuracyCallback
    from runnerkit.callbacks.optuna_pruning import OptunaPruningCallback
    from runnerkit.callbacks.periodic_loader import PeriodicLoaderCallback
    from runnerkit.callbacks.precision_recall import (
        MultilabelPrecisionRecallF1SupportCallback,
        PrecisionRecallF1SupportCallback,
    )
    from runnerkit.callbacks.pruning import PruningCallback
    from runnerkit.callbacks.r2_squared import R2SquaredCallback
    from runnerkit.callbacks.ranking import HitrateCallback, MAPCallback, MRRCallback, NDCGCallback
    from runnerkit.callbacks.run_summary import RunSummaryCallback
    from runnerkit.callbacks.segmentation import DiceCallback, IOUCallback, TrevskyCallback
    from runnerkit.callbacks.sklearn_model import SklearnModelCallback
    from runnerkit.callbacks.swa import SWACallback
    from runnerkit.callbacks.system_metrics import SystemMetricsCallback
    from runnerkit.callbacks.verify_ranks import VerifyRanksCallback
else:  # asked for by few: imported when it is
    __getattr__, __dir__ = late_names(
        __name__,
        {
            "auc": ("AUCCallback",),
            "cmc_score": ("CMCScoreCallback",),
            "confusion_matrix": ("ConfusionMatrixCallback",),
            "r2_squared": ("R2SquaredCallback",),
            "segmentation": (
                "DiceCallback",
                "IOUCallback",
                "TrevskyCallback",
            ),
            "precision_recall": (
                "MultilabelPrecisionRecallF1SupportCallback",
                "PrecisionRecallF1SupportCallback",
            ),
            "ranking": (
                "HitrateCallback",
                "MAPCallback",
                "MRRCallback",
                "NDCGCallback",
            ),
            "multilabel_accuracy": ("MultilabelAccuracyCallback",),
            "swa": ("SWACallback",),
            "ema": ("EMACallback",),
            "batch_size_finder": ("BatchSizeFinder",),
            "dashboard": ("RichDashboardCallback",),
            "export": (
                "OnnxCallback",
                "QuantizationCallback",
                "TracingCallback",
            ),
            "control_flow": ("CallbackWrapper", "ControlFlowCallback"),
            "metric": ("BatchMetricCallback", "FunctionalBatchMetricCallback", "LoaderMetricCallback"),
            "metric_aggregation": ("MetricAggregationCallback",),
            "periodic_loader": ("PeriodicLoaderCallback",),
            "verify_ranks": ("VerifyRanksCallback",),
            "freeze": ("FreezeCallback",),
            "gradient_norm": ("GradNormCallback",),
            "lr_finder": ("LRFinder",),
            "model_summary": ("ModelSummaryCallback",),
            "optuna_pruning": ("OptunaPruningCallback",),
            "pruning": ("PruningCallback",),
            "run_summary": ("RunSummaryCallback",),
            "sklearn_model": ("SklearnModelCallback",),
            "system_metrics": ("SystemMetricsCallback",),
        },
    )

__all__ = [
    "AUCCallback",
    "AccuracyCallback",
    "BackwardCallback",
    "BatchMetricCallback",
    "BatchOverfitCallback",
    "BatchSizeFinder",
    "BatchTransformCallback",
    "CMCScoreCallback",
    "Callback",
    "CallbackNode",
    "CallbackOrder",
    "CallbackWrapper",
    "CheckRunCallback",
    "CheckpointCallback",
    "ConfusionMatrixCallback",
    "ControlFlowCallback",
    "CriterionCallback",
    "DiceCallback",
    "EMACallback",
    "EarlyStoppingCallback",
    "FreezeCallback",
    "FunctionalBatchMetricCallback",
    "GradNormCallback",
    "HangCallback",
    "HitrateCallback",
    "IBackwardCallback",
    "ICallback",
    "ICheckpointCallback",
    "ICriterionCallback",
    "IMetricCallback",
    "IOUCallback",
    "IOptimizerCallback",
    "ISchedulerCallback",
    "LRFinder",
    "LRScaleCallback",
    "LoaderMetricCallback",
    "MAPCallback",
    "MRRCallback",
    "MetricAggregationCallback",
    "ModelSummaryCallback",
    "MultilabelAccuracyCallback",
    "MultilabelPrecisionRecallF1SupportCallback",
    "NDCGCallback",
    "NonFiniteCallback",
    "OnnxCallback",
    "OptimizerCallback",
    "OptunaPruningCallback",
    "PeriodicLoaderCallback",
    "PrecisionRecallF1SupportCallback",
    "ProfilerCallback",
    "PruningCallback",
    "QuantizationCallback",
    "R2SquaredCallback",
    "RichDashboardCallback",
    "RunSummaryCallback",
    "SWACallback",
    "SchedulerCallback",
    "SklearnModelCallback",
    "SystemMetricsCallback",
    "TimerCallback",
    "TqdmCallback",
    "TracingCallback",
    "TrevskyCallback",
    "VerifyRanksCallback",
]
