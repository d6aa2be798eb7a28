"""Cumulative matching characteristic: how often a query's nearest neighbors in a gallery include its label."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.loader_samples import LoaderSamplesCallback
from runnerkit.callbacks.metrics.parts.loader_sums import Sums, widest
from runnerkit.callbacks.metrics.parts.topk import checked_topk

__all__ = ["CMCScoreCallback"]

_NUM_ROWS = 1024  # queries compared with the gallery at once


class CMCScoreCallback(LoaderSamplesCallback):
    """Log ``cmc01`` and so on: the fraction of queries whose label is among their k nearest neighbors in the gallery.

    Distances are Euclidean, in float64; a neighbor at the same distance as the match does not come before it. Queries
    and gallery are samples of one loader, distinguished by a key; use ``ControlFlowCallback`` to select that loader.

    Args:
        embeddings_key: (N, D) float in ``runner.batch``.
        labels_key: (N,) in ``runner.batch``.
        is_query_key: (N,) bool in ``runner.batch``; the other samples are the gallery.
        topk: one or several k; by default 1.
        prefix, suffix: added to the names.

    >>> CMCScoreCallback("embeddings", "labels", "is_query", topk=(1, 5)).provides
    ('cmc01', 'cmc05')
    """

    def __init__(
        self,
        embeddings_key: str,
        labels_key: str,
        is_query_key: str,
        topk: int | Iterable[int] | None = None,
        *,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(
            embeddings_key=embeddings_key,
            labels_key=labels_key,
            is_query_key=is_query_key,
            prefix=prefix,
            suffix=suffix,
        )
        self.topk = checked_topk(self, topk)
        self.provides = tuple(f"{self.prefix}cmc{k:02d}{self.suffix}" for k in self.topk)

    def check(self, *inputs: Tensor) -> None:
        embeddings, labels, is_query = inputs
        if embeddings.ndim != 2 or not labels.shape == is_query.shape == embeddings.shape[:1]:
            raise ValueError(
                "expected embeddings (N, D), labels (N,) and is_query (N,), got "
                f"{tuple(embeddings.shape)}, {tuple(labels.shape)} and {tuple(is_query.shape)}"
            )

    def values(self, *columns: Tensor) -> Sums:
        embeddings, labels, is_query = columns[0], columns[1], columns[2].bool()
        if not is_query.any() or is_query.all():
            raise ValueError(
                f"{int(is_query.sum())} of {len(is_query)} samples are queries: the loader needs queries and a gallery"
            )
        embeddings = widest(embeddings)
        gallery, of_gallery = embeddings[~is_query], labels[~is_query]
        starts = range(0, int(is_query.sum()), _NUM_ROWS)
        of_queries = embeddings[is_query], labels[is_query]
        queries = [[each[start : start + _NUM_ROWS] for each in of_queries] for start in starts]
        places = torch.cat([_places(each, of_each, gallery, of_gallery) for each, of_each in queries])
        return {f"cmc{k:02d}": (places < k).double().mean() for k in self.topk}


def _places(queries: Tensor, labels: Tensor, gallery: Tensor, of_gallery: Tensor) -> Tensor:
    """Count the samples nearer than the nearest match, for each query; int64's maximum if there is no match."""
    # Distances by matrix multiplication would depend on the other samples in the batch.
    distances = torch.cdist(queries, gallery, compute_mode="donot_use_mm_for_euclid_dist")
    is_match = labels.unsqueeze(1) == of_gallery
    nearest = distances.masked_fill(~is_match, torch.inf).amin(dim=1, keepdim=True)
    places = (distances < nearest).sum(dim=1)
    return torch.where(is_match.any(dim=1), places, torch.iinfo(torch.int64).max)
