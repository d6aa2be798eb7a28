# Written by scripts/public_names.py from the __all__ of each file: run `make format`.
from runnerkit.callback import Callback as Callback
from runnerkit.callback import CallbackNode as CallbackNode
from runnerkit.callback import CallbackOrder as CallbackOrder
from runnerkit.callback import IBackwardCallback as IBackwardCallback
from runnerkit.callback import ICallback as ICallback
from runnerkit.callback import ICheckpointCallback as ICheckpointCallback
from runnerkit.callback import ICriterionCallback as ICriterionCallback
from runnerkit.callback import IMetricCallback as IMetricCallback
from runnerkit.callback import IOptimizerCallback as IOptimizerCallback
from runnerkit.callback import ISchedulerCallback as ISchedulerCallback
from runnerkit.callbacks.checkpoint import CheckpointCallback as CheckpointCallback
from runnerkit.callbacks.control.check_run import CheckRunCallback as CheckRunCallback
from runnerkit.callbacks.control.control_flow import CallbackWrapper as CallbackWrapper
from runnerkit.callbacks.control.control_flow import ControlFlowCallback as ControlFlowCallback
from runnerkit.callbacks.control.control_flow import ControlFlowCallbackWrapper as ControlFlowCallbackWrapper
from runnerkit.callbacks.control.early_stop import EarlyStoppingCallback as EarlyStoppingCallback
from runnerkit.callbacks.control.overfit import BatchOverfitCallback as BatchOverfitCallback
from runnerkit.callbacks.control.periodic_loader import PeriodicLoaderCallback as PeriodicLoaderCallback
from runnerkit.callbacks.debug.hang import HangCallback as HangCallback
from runnerkit.callbacks.debug.non_finite import NonFiniteCallback as NonFiniteCallback
from runnerkit.callbacks.debug.verify_ranks import VerifyRanksCallback as VerifyRanksCallback
from runnerkit.callbacks.export.model_export import OnnxCallback as OnnxCallback
from runnerkit.callbacks.export.model_export import QuantizationCallback as QuantizationCallback
from runnerkit.callbacks.export.model_export import TracingCallback as TracingCallback
from runnerkit.callbacks.metrics.accuracy import AccuracyCallback as AccuracyCallback
from runnerkit.callbacks.metrics.accuracy import MultilabelAccuracyCallback as MultilabelAccuracyCallback
from runnerkit.callbacks.metrics.auc import AUCCallback as AUCCallback
from runnerkit.callbacks.metrics.cmc_score import CMCScoreCallback as CMCScoreCallback
from runnerkit.callbacks.metrics.confusion_matrix import ConfusionMatrixCallback as ConfusionMatrixCallback
from runnerkit.callbacks.metrics.metric import BatchMetricCallback as BatchMetricCallback
from runnerkit.callbacks.metrics.metric import FunctionalBatchMetricCallback as FunctionalBatchMetricCallback
from runnerkit.callbacks.metrics.metric import FunctionalMetricCallback as FunctionalMetricCallback
from runnerkit.callbacks.metrics.metric import LoaderMetricCallback as LoaderMetricCallback
from runnerkit.callbacks.metrics.metric_aggregation import MetricAggregationCallback as MetricAggregationCallback
from runnerkit.callbacks.metrics.precision_recall import (
    MultilabelPrecisionRecallF1SupportCallback as MultilabelPrecisionRecallF1SupportCallback,
)
from runnerkit.callbacks.metrics.precision_recall import (
    PrecisionRecallF1SupportCallback as PrecisionRecallF1SupportCallback,
)
from runnerkit.callbacks.metrics.r2_squared import R2SquaredCallback as R2SquaredCallback
from runnerkit.callbacks.metrics.retrieval import HitrateCallback as HitrateCallback
from runnerkit.callbacks.metrics.retrieval import MAPCallback as MAPCallback
from runnerkit.callbacks.metrics.retrieval import MRRCallback as MRRCallback
from runnerkit.callbacks.metrics.retrieval import NDCGCallback as NDCGCallback
from runnerkit.callbacks.metrics.segmentation import DiceCallback as DiceCallback
from runnerkit.callbacks.metrics.segmentation import IOUCallback as IOUCallback
from runnerkit.callbacks.metrics.segmentation import TrevskyCallback as TrevskyCallback
from runnerkit.callbacks.metrics.segmentation import TverskyCallback as TverskyCallback
from runnerkit.callbacks.metrics.sklearn_metric import SklearnBatchCallback as SklearnBatchCallback
from runnerkit.callbacks.metrics.sklearn_metric import SklearnLoaderCallback as SklearnLoaderCallback
from runnerkit.callbacks.metrics.sklearn_model import SklearnModelCallback as SklearnModelCallback
from runnerkit.callbacks.monitor.dashboard import RichDashboardCallback as RichDashboardCallback
from runnerkit.callbacks.monitor.gradient_norm import GradNormCallback as GradNormCallback
from runnerkit.callbacks.monitor.model_summary import ModelSummaryCallback as ModelSummaryCallback
from runnerkit.callbacks.monitor.profiler import ProfilerCallback as ProfilerCallback
from runnerkit.callbacks.monitor.progress import TqdmCallback as TqdmCallback
from runnerkit.callbacks.monitor.run_summary import RunSummaryCallback as RunSummaryCallback
from runnerkit.callbacks.monitor.system_metrics import SystemMetricsCallback as SystemMetricsCallback
from runnerkit.callbacks.monitor.timer import TimerCallback as TimerCallback
from runnerkit.callbacks.search.batch_size_finder import BatchSizeFinder as BatchSizeFinder
from runnerkit.callbacks.search.lr_finder import LRFinder as LRFinder
from runnerkit.callbacks.search.optuna_pruning import OptunaPruningCallback as OptunaPruningCallback
from runnerkit.callbacks.training.backward import BackwardCallback as BackwardCallback
from runnerkit.callbacks.training.batch_transform import BatchTransformCallback as BatchTransformCallback
from runnerkit.callbacks.training.carried_state import CarriedStateCallback as CarriedStateCallback
from runnerkit.callbacks.training.criterion import CriterionCallback as CriterionCallback
from runnerkit.callbacks.training.ema import EMACallback as EMACallback
from runnerkit.callbacks.training.freeze import FreezeCallback as FreezeCallback
from runnerkit.callbacks.training.lr_scale import LRScaleCallback as LRScaleCallback
from runnerkit.callbacks.training.mixup import MixupCallback as MixupCallback
from runnerkit.callbacks.training.optimizer import OptimizerCallback as OptimizerCallback
from runnerkit.callbacks.training.pruning import PruningCallback as PruningCallback
from runnerkit.callbacks.training.scheduler import SchedulerCallback as SchedulerCallback
from runnerkit.callbacks.training.soft_update import SoftUpdateCallaback as SoftUpdateCallaback
from runnerkit.callbacks.training.soft_update import SoftUpdateCallback as SoftUpdateCallback
from runnerkit.callbacks.training.swa import SWACallback as SWACallback
