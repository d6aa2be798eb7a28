"""Losses that torch does not have. Those of metric and contrastive learning are in pytorch-metric-learning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor, nn
from torch.nn.functional import triplet_margin_loss

from runnerkit.data.triplets import ITripletSampler
from runnerkit.support.deprecation import Renamed, accepts_old_names

__all__ = ["DiceLoss", "IoULoss", "TripletMarginLossWithSampler"]


class TripletMarginLossWithSampler(nn.Module):
    """The triplet margin loss of triplets that a sampler selects in each batch.

    Args:
        margin: the distance by which negative samples should be farther than positive ones.
        sampler_inbatch: such as :class:`~runnerkit.data.HardTripletsSampler`.

    >>> import torch
    >>> from runnerkit.data import HardTripletsSampler
    >>> loss = TripletMarginLossWithSampler(margin=0.5, sampler_inbatch=HardTripletsSampler())
    >>> loss(torch.tensor([[0.0], [1.0], [3.0], [9.0]]), torch.tensor([0, 0, 1, 1]))
    tensor(1.1250)
    """

    def __init__(self, margin: float, sampler_inbatch: ITripletSampler) -> None:
        super().__init__()
        self.margin, self.sampler_inbatch = margin, sampler_inbatch

    def forward(self, features: Tensor, labels: Tensor | Sequence[int]) -> Tensor:
        """Return the mean loss, (), of features (N, D) and their classes (N,)."""
        return triplet_margin_loss(*self.sampler_inbatch.sample(features, labels), margin=self.margin)


class IoULoss(nn.Module):
    """One minus intersection over union of probabilities and masks.

    Args:
        class_dim: dimension of the classes.
        average: "macro" is the mean over classes, "micro" counts all pixels together, "weighted" sums weight * overlap.
        weights: of the classes, if `average` is "weighted".
        eps: added to numerator and denominator, so an absent class has the overlap 1.

    >>> import torch
    >>> IoULoss()(torch.tensor([[0.5, 1.0]]), torch.tensor([[1.0, 1.0]]))
    tensor(0.2500)
    """

    hits_factor = 1  # numerator and denominator count a hit this often

    @accepts_old_names(Renamed("mode", "average"))
    def __init__(
        self,
        class_dim: int = 1,
        average: Literal["macro", "micro", "weighted"] = "macro",
        weights: Sequence[float] | None = None,
        eps: float = 1e-7,
    ) -> None:
        super().__init__()
        if average not in ("macro", "micro", "weighted") or (average == "weighted") != (weights is not None):
            raise ValueError(
                f"{type(self).__name__}: average must be 'macro', 'micro', or 'weighted' with weights=, got "
                f"{average!r} with weights={weights!r}"
            )
        self.class_dim, self.average, self.weights, self.eps = class_dim, average, weights, eps

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return 1 - overlap, (), of probabilities (N, C, ...) and masks of the same shape."""
        if outputs.shape != targets.shape:
            raise ValueError(f"expected outputs and masks of one shape, got {outputs.shape} and {targets.shape}")
        hits, all_outputs, all_targets = (
            each.movedim(self.class_dim, 0).flatten(1).sum(dim=1) for each in (outputs * targets, outputs, targets)
        )
        if self.average == "micro":
            hits, all_outputs, all_targets = hits.sum(), all_outputs.sum(), all_targets.sum()
        union = all_outputs + all_targets - (2 - self.hits_factor) * hits
        overlap = (self.hits_factor * hits + self.eps) / (union + self.eps)
        if self.weights is not None:
            return 1 - (overlap * overlap.new_tensor(self.weights)).sum()
        return 1 - overlap.mean()


class DiceLoss(IoULoss):
    """One minus the Dice coefficient; arguments as in :class:`IoULoss`.

    >>> import torch
    >>> DiceLoss()(torch.tensor([[0.5, 1.0]]), torch.tensor([[1.0, 1.0]]))
    tensor(0.1667)
    """

    hits_factor = 2
