"""Samplers, loaders, and augmentation on the device of the batch."""

from __future__ import annotations

from runnerkit.data.augmentation import BatchNormalize, BatchRandomCrop, BatchRandomHorizontalFlip
from runnerkit.data.balance import BalanceClassSampler, BatchBalanceClassSampler
from runnerkit.data.distributed import DistributedSamplerWrapper
from runnerkit.data.dynamic_balance import DynamicBalanceClassSampler
from runnerkit.data.limit import BatchLimitLoaderWrapper
from runnerkit.data.prefetch import BatchPrefetchLoaderWrapper
from runnerkit.data.tensor_loader import TensorLoader
from runnerkit.data.tensor_rows import TensorRows

__all__ = [
    "BalanceClassSampler",
    "BatchBalanceClassSampler",
    "BatchLimitLoaderWrapper",
    "BatchNormalize",
    "BatchPrefetchLoaderWrapper",
    "BatchRandomCrop",
    "BatchRandomHorizontalFlip",
    "DistributedSamplerWrapper",
    "DynamicBalanceClassSampler",
    "TensorLoader",
    "TensorRows",
]
