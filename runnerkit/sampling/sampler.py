"""The batch sampler for custom loaders (docs/loaders.md)."""

from __future__ import annotations

from runnerkit.sampling.indexed.sampler import ShardedBatchSampler

__all__ = ["ShardedBatchSampler"]
