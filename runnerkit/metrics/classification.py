"""Accuracy: top-k of a classifier, and of multilabel decisions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runnerkit.metrics.class_indices import (
    check_logits,
    check_multilabel,
    check_none_outside,
    is_above,
    num_outside,
    predicted_classes,
)
from runnerkit.metrics.metric import Sums, SumsMetric, checked_topk, ratio
from runnerkit.support.arguments import check_integers, check_numbers
from runnerkit.support.deprecation import Renamed, accepts_old_names

__all__ = ["AccuracyMetric", "MultilabelAccuracyMetric", "accuracy", "topk_hits"]


def topk_hits(logits: Tensor, targets: Tensor, topk: Sequence[int], *, threshold: float | None = None) -> list[Tensor]:
    """Count, for each k of `topk`, the rows whose target is among the k largest logits.

    Args:
        logits: (N, C) float, on any device; or, for k = 1, one float score or integer class index per row, (N,) or
            (N, 1).
        targets: (N,) int64 in [0, C), or (N, 1) if the logits are; a row with another target is not a hit.
        topk: each in [1, C].
        threshold: scores of shape (N,) or (N, 1) above it are class 1, others class 0; 0 for logits, 0.5 for
            probabilities.
    Returns:
        One () count for each k, on the device of `logits`: float64 on CPUs and CUDA, else int64; no host sync.
    Raises:
        ValueError: a k is outside [1, C], a shape is wrong, or `threshold` is missing or not used.

    >>> logits = torch.tensor([[0.1, 0.9], [0.8, 0.2]])
    >>> topk_hits(logits, torch.tensor([1, 1]), (1, 2))
    [tensor(1., dtype=torch.float64), tensor(2., dtype=torch.float64)]
    """
    # float64 is exact up to 2^53 too, and a division takes one operation.
    dtype = torch.float64 if logits.device.type in ("cpu", "cuda") else torch.int64  # MPS and some XPUs lack float64
    if logits.shape[1:] in ((), (1,)) and targets.shape in (logits.shape, logits.shape[:1]):
        if any(k != 1 for k in topk):
            raise ValueError(f"topk must be 1 for one output per row, {tuple(logits.shape)}, got {tuple(topk)}")
        is_hit = predicted_classes(logits, threshold).reshape(-1).eq(targets.reshape(-1))
        return [is_hit.sum(dtype=dtype) for _ in topk]
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(
            f"expected logits (N, C) and targets (N,), got {tuple(logits.shape)} and {tuple(targets.shape)}; "
            "accuracy is for one class index per row"
        )
    if threshold is not None or logits.dtype is torch.bool:
        check_logits(logits, threshold)
    num_classes = logits.shape[1]
    for k in topk:
        if not 1 <= k <= num_classes:
            raise ValueError(f"k must be in [1, {num_classes}] for {num_classes} classes, got {k}")
    # For k = 1 the first of equal scores, frequent in half precision, always wins, regardless of the other k.
    hits = []
    for k in topk:
        is_hit = logits.argmax(1).eq(targets) if k == 1 else logits.topk(k, dim=1).indices.eq(targets.unsqueeze(1))
        hits += [is_hit.sum(dtype=dtype)]
    return hits


def accuracy(
    logits: Tensor, targets: Tensor, topk: Sequence[int] = (1,), *, threshold: float | None = None
) -> list[Tensor]:
    """Compute the fraction of rows whose target is among the k largest logits, for each k of `topk`.

    Args:
        logits, targets, topk, threshold: see :func:`topk_hits`.
    Returns:
        One () tensor in [0, 1] for each k, NaN without rows, on the device of `logits`; float64 on CPUs and CUDA, so
        that its mean over a loader is the exact fraction of rows, without the rounding errors of float32.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]), topk=(1, 2))
    [tensor(0.5000, dtype=torch.float64), tensor(1., dtype=torch.float64)]
    """
    return [hits / (len(targets) or math.nan) for hits in topk_hits(logits, targets, topk, threshold=threshold)]


class AccuracyMetric(SumsMetric):
    """Values ``accuracy`` (top-1), ``accuracy03`` (top-3) and so on, for each k in `topk`.

    Each is the fraction of correct rows, from counts of hits and rows. Rows need not be samples (tokens, boxes), and
    batches may have different numbers of them. Update with logits (N, C) and class indices (N,) int64, or with one
    output per row, (N,) or (N, 1): integer class indices, or the float scores of a binary classifier.

    Args:
        topk: one or several k in [1, C]; by default 1, and 3 and 5 if `num_classes` is larger.
        num_classes: C, for the default of `topk`.
        threshold: a binary classifier's scores above it are class 1, others class 0; 0 for logits, 0.5 for
            probabilities. Required for scores (N,) and (N, 1), and only for these.
        prefix, suffix: added to the names.
    Raises:
        ValueError: a k exceeds the number of classes, a batch has wrong shapes, or `threshold` is missing or not used.

    >>> metric = AccuracyMetric(topk=(1, 2))
    >>> metric.update(torch.tensor([[0.1, 0.9, 0.0], [0.8, 0.2, 0.1]]), torch.tensor([1, 1]))
    >>> metric.compute_key_value()
    {'accuracy': 0.5, 'accuracy02': 1.0}
    >>> binary = AccuracyMetric(threshold=0)
    >>> binary.update(torch.tensor([[1.5], [-0.2]]), torch.tensor([1, 1]))
    >>> binary.compute_key_value()["accuracy"]
    0.5
    """

    @accepts_old_names(Renamed("topk_args", "topk"))
    def __init__(
        self,
        topk: int | Iterable[int] | None = None,
        num_classes: int | None = None,
        *,
        threshold: float | None = None,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        check_integers(self, or_none=True, num_classes=num_classes)
        check_numbers(self, or_none=True, threshold=threshold)
        self.threshold = threshold
        self.topk = _topk(self, topk, num_classes)
        # By name of the value, the name of the sum: those in checkpoints keep the names of earlier versions.
        self._sum_names = [f"accuracy{k:02d}" for k in self.topk]
        names = ["accuracy" if k == 1 else f"accuracy{k:02d}" for k in self.topk]
        self._shares = list(zip(names, self._sum_names, strict=True))
        super().__init__(names, prefix=prefix, suffix=suffix)

    def count(self, logits: Tensor, targets: Tensor) -> Sums:
        hits = topk_hits(logits.detach(), targets, self.topk, threshold=self.threshold)
        sums: Sums = dict(zip(self._sum_names, hits, strict=True))
        sums["num"] = targets.shape[0]
        return sums

    def values(self, sums: Sums) -> Sums:
        num = float(sums["num"] or math.nan)  # dividing by an int would launch an extra cast
        shares = {}
        for name, of_hits in self._shares:
            shares[name] = sums[of_hits] / num
        return shares


def _topk(owner: object, topk: int | Iterable[int] | None, num_classes: int | None) -> tuple[int, ...]:
    if topk is None:
        return tuple(k for k in (1, 3, 5) if k == 1 or (num_classes is not None and k < num_classes))
    ks = checked_topk(owner, topk)
    if num_classes is not None and max(ks) > num_classes:
        raise ValueError(f"{type(owner).__name__}: topk {ks} exceeds the {num_classes} classes")
    return ks


class MultilabelAccuracyMetric(SumsMetric):
    """Value ``accuracy``: the fraction of correct decisions among all N * C pairs of sample and label.

    Update with scores (N, C) and 0/1 targets (N, C); a target above 0.5, for example smoothed, is 1.

    Args:
        threshold: scores above it are positive; a number, or a (C,) tensor with one per class. Pass 0 for logits.
        prefix, suffix: added to the name.

    >>> metric = MultilabelAccuracyMetric()
    >>> metric.update(torch.tensor([[0.9, 0.6]]), torch.tensor([[1, 0]]))
    >>> metric.compute()
    0.5
    """

    def __init__(
        self, threshold: float | Tensor = 0.5, *, prefix: str | None = None, suffix: str | None = None
    ) -> None:
        if not isinstance(threshold, Tensor):
            check_numbers(self, threshold=threshold)
        self.threshold = threshold
        super().__init__(["accuracy"], prefix=prefix, suffix=suffix)

    def count(self, scores: Tensor, targets: Tensor) -> Sums:
        check_multilabel(scores, targets)
        threshold = self.threshold
        if isinstance(threshold, Tensor):
            self.threshold = threshold = threshold.to(scores.device)  # copied once
        right = is_above(scores, threshold) == (targets > 0.5)
        num = right.new_full((), right.numel(), dtype=torch.int64)
        return {"right": right.sum(), "all": num, "outside": num_outside(targets, of="targets")}

    def check_total(self, sums: Sums) -> None:
        check_none_outside(sums.get("outside", 0), of="targets")

    def values(self, sums: Sums) -> Sums:
        return {"accuracy": ratio(sums["right"], sums["all"], zero_division=math.nan)}
