# Written by scripts/public_names.py from the __all__ of each file: run `make format`.
from runnerkit.metrics.classification import AccuracyMetric as AccuracyMetric
from runnerkit.metrics.classification import MultilabelAccuracyMetric as MultilabelAccuracyMetric
from runnerkit.metrics.classification import accuracy as accuracy
from runnerkit.metrics.classification import topk_hits as topk_hits
from runnerkit.metrics.confusion_matrix import ConfusionMatrixMetric as ConfusionMatrixMetric
from runnerkit.metrics.matching import CMCMetric as CMCMetric
from runnerkit.metrics.matching import cmc_score as cmc_score
from runnerkit.metrics.means import AdditiveMetric as AdditiveMetric
from runnerkit.metrics.means import LoaderMeans as LoaderMeans
from runnerkit.metrics.metric import Metric as Metric
from runnerkit.metrics.metric import SamplesMetric as SamplesMetric
from runnerkit.metrics.metric import SumsMetric as SumsMetric
from runnerkit.metrics.precision_recall import (
    MultilabelPrecisionRecallF1SupportMetric as MultilabelPrecisionRecallF1SupportMetric,
)
from runnerkit.metrics.precision_recall import PrecisionRecallF1SupportMetric as PrecisionRecallF1SupportMetric
from runnerkit.metrics.precision_recall import precision_recall_fbeta_support as precision_recall_fbeta_support
from runnerkit.metrics.reduction import PartialSums as PartialSums
from runnerkit.metrics.reduction import Share as Share
from runnerkit.metrics.regression import R2Metric as R2Metric
from runnerkit.metrics.regression import r2 as r2
from runnerkit.metrics.retrieval import HitrateMetric as HitrateMetric
from runnerkit.metrics.retrieval import MAPMetric as MAPMetric
from runnerkit.metrics.retrieval import MRRMetric as MRRMetric
from runnerkit.metrics.retrieval import NDCGMetric as NDCGMetric
from runnerkit.metrics.retrieval import average_precision as average_precision
from runnerkit.metrics.retrieval import hitrate as hitrate
from runnerkit.metrics.retrieval import map_score as map_score
from runnerkit.metrics.retrieval import mrr as mrr
from runnerkit.metrics.retrieval import ndcg as ndcg
from runnerkit.metrics.roc import AUCMetric as AUCMetric
from runnerkit.metrics.roc import auc as auc
from runnerkit.metrics.roc import roc_curve as roc_curve
from runnerkit.metrics.segmentation import DiceMetric as DiceMetric
from runnerkit.metrics.segmentation import IOUMetric as IOUMetric
from runnerkit.metrics.segmentation import TrevskyMetric as TrevskyMetric
from runnerkit.metrics.segmentation import TverskyMetric as TverskyMetric
from runnerkit.metrics.segmentation import dice as dice
from runnerkit.metrics.segmentation import iou as iou
from runnerkit.metrics.segmentation import trevsky as trevsky
from runnerkit.metrics.segmentation import tversky as tversky
