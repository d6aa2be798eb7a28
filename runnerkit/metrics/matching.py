"""Cumulative matching characteristic: how often a query's nearest neighbors in a gallery include its label."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from runnerkit.metrics.metric import SamplesMetric, Sums, checked_topk, widest
from runnerkit.support.deprecation import Renamed, accepts_old_names

__all__ = ["CMCMetric", "cmc_score"]

_NUM_ROWS = 1024  # queries compared with the gallery at once


def cmc_score(queries: Tensor, gallery: Tensor, is_match: Tensor, topk: int = 1) -> Tensor:
    """Compute the fraction of queries with a match among their k nearest neighbors in the gallery.

    Distances are Euclidean, in float64; a neighbor at the same distance as the match does not come before it.

    Args:
        queries: (Q, D) float.
        gallery: (G, D) float.
        is_match: (Q, G) bool or 0/1: whether query and gallery sample have the same label.
        topk: k >= 1.
    Returns:
        () in [0, 1], NaN without queries or if an embedding is NaN; float64 if the device supports it.
    Raises:
        ValueError: the shapes do not match, the gallery is empty, or k is not an integer >= 1.

    >>> cmc_score(torch.tensor([[0.0], [9.0]]), torch.tensor([[1.0], [2.0]]), torch.eye(2))
    tensor(1., dtype=torch.float64)
    """
    [k] = checked_topk("cmc_score", topk)
    if queries.ndim != 2 or gallery.ndim != 2 or is_match.shape != (len(queries), len(gallery)):
        raise ValueError(
            "expected queries (Q, D), gallery (G, D) and is_match (Q, G), got "
            f"{tuple(queries.shape)}, {tuple(gallery.shape)} and {tuple(is_match.shape)}"
        )
    if not len(gallery) or queries.shape[1] != gallery.shape[1]:
        raise ValueError(
            f"expected a gallery (G, {queries.shape[1]}) of one sample or more, got {tuple(gallery.shape)}"
        )
    return _share(_places(widest(queries), widest(gallery), is_match > 0.5), k)


class CMCMetric(SamplesMetric):
    """Values ``cmc01`` and so on: :func:`cmc_score` of queries and gallery, which are samples of one data set.

    Update with embeddings (N, D), labels (N,) and is_query (N,) bool; the other samples are the gallery.

    Args:
        topk: one or several k; by default 1.
        prefix, suffix: added to the names.

    >>> metric = CMCMetric()
    >>> metric.update(torch.tensor([[0.0], [1.0], [9.0]]), torch.tensor([5, 5, 7]), torch.tensor([True, False, False]))
    >>> metric.compute()
    1.0
    """

    @accepts_old_names(Renamed("topk_args", "topk"))
    def __init__(
        self, topk: int | Iterable[int] | None = None, *, prefix: str | None = None, suffix: str | None = None
    ) -> None:
        self.topk = checked_topk(self, topk)
        super().__init__([f"cmc{k:02d}" for k in self.topk], prefix=prefix, suffix=suffix)

    def columns(self, embeddings: Tensor, labels: Tensor, is_query: Tensor) -> list[Tensor]:
        if embeddings.ndim != 2 or not labels.shape == is_query.shape == embeddings.shape[:1]:
            raise ValueError(
                "expected embeddings (N, D), labels (N,) and is_query (N,), got "
                f"{tuple(embeddings.shape)}, {tuple(labels.shape)} and {tuple(is_query.shape)}"
            )
        return [embeddings, labels, is_query]

    def values(self, embeddings: Tensor, labels: Tensor, is_query: Tensor) -> Sums:
        is_query = is_query.bool()
        if not is_query.any() or is_query.all():
            raise ValueError(
                f"{int(is_query.sum())} of {len(is_query)} samples are queries: the loader needs queries and a gallery"
            )
        embeddings = widest(embeddings)
        gallery, of_gallery = embeddings[~is_query], labels[~is_query]
        chunks = zip(embeddings[is_query].split(_NUM_ROWS), labels[is_query].split(_NUM_ROWS), strict=True)
        places = torch.cat([_places(each, gallery, of_each.unsqueeze(1) == of_gallery) for each, of_each in chunks])
        return {f"cmc{k:02d}": _share(places, k) for k in self.topk}


def _places(queries: Tensor, gallery: Tensor, is_match: Tensor) -> Tensor:
    """Count the samples nearer than the nearest match, for each query; int64's maximum without a match, -1 for NaN."""
    # Distances by matrix multiplication would depend on the other samples in the batch.
    distances = torch.cdist(queries, gallery, compute_mode="donot_use_mm_for_euclid_dist")
    nearest = distances.masked_fill(~is_match, torch.inf).amin(dim=1, keepdim=True)
    places = (distances < nearest).sum(dim=1)
    places = torch.where(is_match.any(dim=1), places, torch.iinfo(torch.int64).max)
    return torch.where(distances.isnan().any(dim=1), -1, places)


def _share(places: Tensor, k: int) -> Tensor:
    return torch.where((places < 0).any(), torch.nan, widest(places < k).mean())
