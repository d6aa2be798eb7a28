# Written by scripts/public_names.py from the __all__ of each file: run `make format`.
from runnerkit.data.augmentation import BatchNormalize as BatchNormalize
from runnerkit.data.augmentation import BatchRandomCrop as BatchRandomCrop
from runnerkit.data.augmentation import BatchRandomHorizontalFlip as BatchRandomHorizontalFlip
from runnerkit.data.balance import BalanceClassSampler as BalanceClassSampler
from runnerkit.data.balance import BatchBalanceClassSampler as BatchBalanceClassSampler
from runnerkit.data.distributed import DistributedSamplerWrapper as DistributedSamplerWrapper
from runnerkit.data.dynamic_balance import DynamicBalanceClassSampler as DynamicBalanceClassSampler
from runnerkit.data.epoch_steps import EpochStepsLoaderWrapper as EpochStepsLoaderWrapper
from runnerkit.data.limit import BatchLimitLoaderWrapper as BatchLimitLoaderWrapper
from runnerkit.data.prefetch import BatchPrefetchLoaderWrapper as BatchPrefetchLoaderWrapper
from runnerkit.data.self_supervised import SelfSupervisedDatasetWrapper as SelfSupervisedDatasetWrapper
from runnerkit.data.sequence_rows import SequenceRows as SequenceRows
from runnerkit.data.sharded_files import ShardedFiles as ShardedFiles
from runnerkit.data.tensor_loader import TensorLoader as TensorLoader
from runnerkit.data.tensor_rows import TensorRows as TensorRows
from runnerkit.data.triplets import AllTripletsSampler as AllTripletsSampler
from runnerkit.data.triplets import HardTripletsSampler as HardTripletsSampler
from runnerkit.data.triplets import ITripletSampler as ITripletSampler

__all__ = [
    "AllTripletsSampler",
    "BalanceClassSampler",
    "BatchBalanceClassSampler",
    "BatchLimitLoaderWrapper",
    "BatchNormalize",
    "BatchPrefetchLoaderWrapper",
    "BatchRandomCrop",
    "BatchRandomHorizontalFlip",
    "DistributedSamplerWrapper",
    "DynamicBalanceClassSampler",
    "EpochStepsLoaderWrapper",
    "HardTripletsSampler",
    "ITripletSampler",
    "SelfSupervisedDatasetWrapper",
    "SequenceRows",
    "ShardedFiles",
    "TensorLoader",
    "TensorRows",
]
