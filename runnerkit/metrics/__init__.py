"""Means over a loader that are exact on any number of processes, and the metrics built on them."""

from __future__ import annotations

from runnerkit.metrics.means import AdditiveMetric, LoaderMeans, accuracy, topk_hits
from runnerkit.metrics.reduction import Share

__all__ = ["AdditiveMetric", "LoaderMeans", "Share", "accuracy", "topk_hits"]
