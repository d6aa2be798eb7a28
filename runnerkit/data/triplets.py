"""Triplets for metric learning, selected within a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["AllTripletsSampler", "HardTripletsSampler", "ITripletSampler"]


class ITripletSampler(ABC):
    """Selects triplets of an anchor, a sample of its class and one of another.

    A batch needs two classes and two samples of each, as :class:`BatchBalanceClassSampler` draws them.
    """

    @abstractmethod
    def indices(self, features: Tensor, is_same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the positions of anchors, positive and negative samples, (T,) int64 each.

        Args:
            features: (N, D).
            is_same: (N, N) bool, whether two samples have the same class; for each sample, another one has
                the same class, and another one does not.
        """

    def sample(self, features: Tensor, labels: Tensor | Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the features of anchors, positive and negative samples, (T, D) each.

        Args:
            features: (N, D) float.
            labels: (N,) classes.
        Raises:
            ValueError: a class has a single sample, or there is only one class.
        """
        classes = torch.as_tensor(labels, device=features.device)
        if features.ndim != 2 or classes.shape != features.shape[:1]:
            raise ValueError(f"expected features (N, D) and labels (N,), got {_shape(features)} and {_shape(classes)}")
        is_same = classes.unsqueeze(1) == classes
        num_same = is_same.sum(dim=1)
        if not bool(((num_same > 1) & (num_same < len(classes))).all()):
            raise ValueError("triplets need two classes and two samples of each: use BatchBalanceClassSampler")
        anchors, positives, negatives = self.indices(features, is_same)
        return features[anchors], features[positives], features[negatives]


class HardTripletsSampler(ITripletSampler):
    """For each anchor, the sample of its class that is farthest, and the nearest of all others. arXiv:1703.07737

    Args:
        norm_required: compare directions: features are divided by their norms.

    >>> features, labels = torch.tensor([[0.0], [1.0], [3.0], [9.0]]), [0, 0, 1, 1]
    >>> [each.flatten().tolist() for each in HardTripletsSampler().sample(features, labels)]
    [[0.0, 1.0, 3.0, 9.0], [1.0, 0.0, 9.0, 3.0], [3.0, 3.0, 1.0, 1.0]]
    """

    def __init__(self, norm_required: bool = False) -> None:
        self.norm_required = norm_required

    def indices(self, features: Tensor, is_same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        compared = F.normalize(features.detach(), dim=1) if self.norm_required else features.detach()
        distances = torch.cdist(compared, compared)
        itself = torch.eye(len(features), dtype=torch.bool, device=features.device)
        positives = distances.masked_fill(~is_same | itself, -1).argmax(dim=1)
        negatives = distances.masked_fill(is_same, torch.inf).argmin(dim=1)
        return torch.arange(len(features), device=features.device), positives, negatives


class AllTripletsSampler(ITripletSampler):
    """All triplets, or a random part of them; a pair of samples of a class occurs once, in the order of the batch.

    Args:
        max_output_triplets: their largest number; None is all.

    >>> features, labels = torch.arange(4.0).unsqueeze(1), [0, 0, 1, 1]
    >>> [each.flatten().tolist() for each in AllTripletsSampler().sample(features, labels)]
    [[0.0, 0.0, 2.0, 2.0], [1.0, 1.0, 3.0, 3.0], [2.0, 3.0, 0.0, 1.0]]
    """

    def __init__(self, max_output_triplets: int | None = None) -> None:
        self.max_output_triplets = max_output_triplets

    def indices(self, features: Tensor, is_same: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        pairs = is_same.triu(diagonal=1)
        anchors, positives, negatives = (pairs.unsqueeze(2) & ~is_same.unsqueeze(1)).nonzero().unbind(1)
        if self.max_output_triplets is not None and len(anchors) > self.max_output_triplets:
            drawn = torch.randperm(len(anchors), device=anchors.device)[: self.max_output_triplets]
            return anchors[drawn], positives[drawn], negatives[drawn]
        return anchors, positives, negatives


def _shape(tensor: Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)
