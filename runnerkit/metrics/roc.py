"""ROC and precision-recall curves, and the area under the ROC curve per class and averaged over classes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from runnerkit.metrics.class_indices import by_class, check_classes, check_none_outside, num_outside
from runnerkit.metrics.metric import SamplesMetric, Sums, ratio, widest

__all__ = ["AUCMetric", "auc", "roc_curve"]

_NUM_POINTS = 51  # of a curve that is drawn or stored


def auc(scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the area under the ROC curve of each class against all others.

    No activation is needed: only the order matters.

    Args:
        scores: (N, C); (N,) or (N, 1) are scores of the second of two classes.
        targets: 0/1 targets of as many elements, of which those above 0.5 are 1; or class indices (N,), for scores
            (N, C) of C > 1 classes.
    Returns:
        (C,) in [0, 1], NaN for a class without both positive and negative samples; float64 if the device supports it.
    Raises:
        ValueError: the shapes do not match, a class index is outside [0, C), or another target outside [0, 1].

    >>> auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    tensor([0.7500], dtype=torch.float64)
    """
    return _of_classes(*_one_against_others(scores, targets))


def roc_curve(scores: Tensor, targets: Tensor, *, max_points: int | None = None) -> dict[str, Tensor]:
    """Compute the rates of a binary classifier at each distinct score as its threshold, from the highest.

    Args:
        scores: (N,); scores >= the threshold are classified as positive.
        targets: (N,), 0 or 1.
        max_points: keep at most as many points, at about equal distances along the curve, with its ends.
    Returns:
        threshold, true_positive_rate (which is recall), false_positive_rate and precision, (P,) float64 each; P is 0 if
        there are no positive or no negative samples, or a score is NaN.
    Raises:
        ValueError: the shapes are not (N,), a target is outside [0, 1], or `max_points` is below 2.

    >>> curve = roc_curve(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    >>> curve["true_positive_rate"].tolist(), curve["false_positive_rate"].tolist()
    ([0.5, 0.5, 1.0, 1.0], [0.0, 0.5, 0.5, 1.0])
    """
    if scores.ndim != 1 or targets.shape != scores.shape:
        raise ValueError(f"expected scores and targets (N,), got {tuple(scores.shape)} and {tuple(targets.shape)}")
    if max_points is not None and max_points < 2:
        raise ValueError(f"max_points must be >= 2 or None, got {max_points}")
    check_none_outside(num_outside(targets, of="targets"), of="targets")
    is_positive = targets > 0.5
    thresholds, place, count = scores.unique(return_inverse=True, return_counts=True)
    positive = torch.zeros_like(count).index_add_(0, place, is_positive.long())
    true, false = (widest(each.flip(0).cumsum(0)) for each in (positive, count - positive))  # at or above each score
    curve = {
        "threshold": widest(thresholds).flip(0),
        "true_positive_rate": true / true[-1:],
        "false_positive_rate": false / false[-1:],
        "precision": true / (true + false),
    }
    if not (is_positive.any() and (~is_positive).any()) or scores.isnan().any():
        return {name: each[:0] for name, each in curve.items()}
    if max_points is not None and len(thresholds) > max_points:
        length = curve["true_positive_rate"] + curve["false_positive_rate"]  # from 0 to 2, it never falls
        steps = torch.linspace(0, 2, max_points, dtype=length.dtype, device=length.device)
        chosen = torch.searchsorted(length, steps).clamp(max=len(length) - 1).unique()
        curve = {name: each[chosen] for name, each in curve.items()}
    return curve


class AUCMetric(SamplesMetric):
    """Values ``auc`` and ``auc/_macro``, both the mean over classes, ``auc/_micro`` and ``auc/_weighted``.

    A class without both positive and negative samples is NaN, and the means skip it. The weight of a class is its
    number of samples. Update with scores and targets as in :func:`auc`.

    Args:
        compute_per_class_metrics: also ``auc/class_00`` and so on.
        prefix, suffix: added to the names.

    >>> metric = AUCMetric()
    >>> metric.update(torch.tensor([0.1, 0.4]), torch.tensor([0, 0]))
    >>> metric.update(torch.tensor([0.35, 0.8]), torch.tensor([1, 1]))
    >>> metric.compute_key_value()["auc"]
    0.75
    """

    def __init__(
        self, *, compute_per_class_metrics: bool = False, prefix: str | None = None, suffix: str | None = None
    ) -> None:
        self.compute_per_class_metrics = compute_per_class_metrics
        super().__init__(["auc", "auc/_micro", "auc/_macro", "auc/_weighted"], prefix=prefix, suffix=suffix)

    def columns(self, scores: Tensor, targets: Tensor) -> list[Tensor]:
        _check_shapes(scores, targets)
        return [scores, targets]

    def values(self, scores: Tensor, targets: Tensor) -> Sums:
        scores, is_positive = _one_against_others(scores, targets)
        of_classes = _of_classes(scores, is_positive)
        macro, support = of_classes.nanmean(), is_positive.sum(dim=0) * ~of_classes.isnan()
        values = {
            "auc": macro,
            "auc/_micro": roc_auc(scores.reshape(-1), is_positive.reshape(-1)),
            "auc/_macro": macro,
            "auc/_weighted": ratio((of_classes.nan_to_num() * support).sum(), support.sum(), zero_division=torch.nan),
        }
        if self.compute_per_class_metrics:
            values |= by_class("auc", of_classes)
        return values

    @property
    def num_classes(self) -> int:
        """Number of classes of the batches so far; 1 for scores (N,), 0 without batches."""
        return math.prod(self._batches[0][0].shape[1:]) if self._batches else 0

    def curves(self) -> list[dict[str, Tensor]]:
        """Return the :func:`roc_curve` of each class over all batches, with at most 51 points each."""
        if self.is_empty:
            return []
        pairs = zip(*(each.unbind(1) for each in _one_against_others(*self.all_columns())), strict=True)
        return [roc_curve(*pair, max_points=_NUM_POINTS) for pair in pairs]


def _of_classes(scores: Tensor, is_positive: Tensor) -> Tensor:
    return torch.stack([roc_auc(*pair) for pair in zip(scores.unbind(1), is_positive.unbind(1), strict=True)])


def _check_shapes(scores: Tensor, targets: Tensor) -> None:
    if scores.ndim not in (1, 2) or targets.shape not in (scores.shape, scores.shape[:1]):
        raise ValueError(
            f"expected scores (N, C) and targets (N, C) or (N,), or both (N,), got {tuple(scores.shape)} and "
            f"{tuple(targets.shape)}"
        )


def _one_against_others(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return scores (N, C), and which of them are of positive samples, (N, C) bool."""
    _check_shapes(scores, targets)
    if scores.ndim == 2 and scores.shape[1] > 1 and targets.ndim == 1:
        classes = torch.arange(scores.shape[1], device=targets.device)
        check_classes(targets, num_classes=len(classes))
        is_positive = targets.unsqueeze(1) == classes
    else:
        check_none_outside(num_outside(targets, of="targets"), of="targets")
        is_positive = targets > 0.5
    num_classes = math.prod(scores.shape[1:])  # -1 would not do for a batch without samples
    return scores.reshape(-1, num_classes), is_positive.reshape(-1, num_classes)


def roc_auc(scores: Tensor, targets: Tensor) -> Tensor:
    """Compute the probability that a positive sample scores above a negative one; a tie counts one half.

    This is the Mann-Whitney U statistic divided by the number of pairs; only the last division is rounded.

    Args:
        scores: (N,).
        targets: (N,) bool.
    Returns:
        () in [0, 1], NaN if there are no pairs or a score is NaN; float64 if the device supports it.

    >>> roc_auc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([False, False, True, True]))
    tensor(0.7500, dtype=torch.float64)
    """
    _, place, count = scores.unique(return_inverse=True, return_counts=True)
    first = count.cumsum(0) - count
    twice_rank = (2 * first + count + 1)[place]  # tied scores have their mean rank; twice that is an integer
    num_positive = targets.sum()
    num_pairs = num_positive * (len(targets) - num_positive)
    twice_u = (twice_rank * targets).sum() - num_positive * (num_positive + 1)
    area = ratio(twice_u, 2 * num_pairs, zero_division=torch.nan)
    return torch.where(scores.isnan().any(), torch.nan, area)
