"""Precision, recall, F1 and support, per class and averaged over classes."""

from __future__ import annotations

from torch import Tensor

from runnerkit.metrics.class_indices import (
    by_class,
    check_all_classes,
    check_multilabel,
    check_none_outside,
    class_indices,
    count_indices,
    is_above,
    num_outside,
)
from runnerkit.metrics.metric import Sums, SumsMetric, ratio
from runnerkit.support.arguments import check_integers, check_numbers

__all__ = [
    "MultilabelPrecisionRecallF1SupportMetric",
    "PrecisionRecallF1SupportMetric",
    "precision_recall_fbeta_support",
]

_NAMES = [f"{name}/{each}" for name in ("precision", "recall", "f1") for each in ("_micro", "_macro", "_weighted")]


def precision_recall_fbeta_support(
    outputs: Tensor,
    targets: Tensor,
    beta: float = 1,
    *,
    num_classes: int | None = None,
    zero_division: float = 0,
    threshold: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the values of each class, as scikit-learn's function of this name does.

    Args:
        outputs: logits (N, C, ...), or class indices (N, ...), which need `num_classes`, or a binary classifier's
            scores, (N, ...) or (N, 1, ...) float.
        targets: class indices (N, ...) int64.
        beta: weight of recall in F.
        num_classes: C; None takes it from the logits.
        zero_division: the value if a denominator is 0.
        threshold: a binary classifier's scores above it are class 1; 0 for logits, 0.5 for probabilities.
    Returns:
        precision, recall and F, (C,) float64 each, and support, (C,) int64; no host sync on a GPU.

    >>> import torch
    >>> precision, *_, support = precision_recall_fbeta_support(torch.eye(2), torch.tensor([0, 0]))
    >>> precision, support
    (tensor([1., 0.], dtype=torch.float64), tensor([2, 0]))
    """
    counts = {name: each[:-1] for name, each in _counts(outputs, targets, num_classes, threshold).items()}
    parts = _parts(counts, beta=beta)
    values = [ratio(*each, zero_division=zero_division) for each in parts.values()]
    return values[0], values[1], values[2], counts["support"]


class _PrecisionRecallMetric(SumsMetric):
    default_threshold: float | None = None

    def __init__(
        self,
        num_classes: int | None = None,
        zero_division: float = 0,
        *,
        threshold: float | None = None,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        check_integers(self, or_none=True, num_classes=num_classes)
        check_numbers(self, zero_division=zero_division)
        check_numbers(self, or_none=True, threshold=threshold)
        self.num_classes, self.zero_division = num_classes, zero_division
        self.threshold = self.default_threshold if threshold is None else threshold
        self.compute_per_class_metrics = compute_per_class_metrics
        super().__init__(_NAMES, prefix=prefix, suffix=suffix)

    def by_class(self) -> dict[str, Tensor]:
        """Return precision, recall, f1, (C,) float64 each, and support, (C,) int64, over all batches; {} without any.

        Raises:
            ValueError: a class index was outside [0, C).
        """
        if self.is_empty:
            return {}
        self.check_total(self._sums)
        counts = self._valid(self._sums)
        parts = _parts(counts).items()
        return {name: ratio(*each, zero_division=self.zero_division) for name, each in parts} | {
            "support": counts["support"]
        }

    def _valid(self, sums: Sums) -> Sums:
        """Return hits, predicted and support, (C,) int64 each."""
        return sums

    def values(self, sums: Sums) -> Sums:
        sums = self._valid(sums)
        support, zero_division, values = sums["support"], self.zero_division, {}
        for name, (numerator, denominator) in _parts(sums).items():
            of_classes = ratio(numerator, denominator, zero_division=zero_division)
            values[f"{name}/_micro"] = ratio(numerator.sum(), denominator.sum(), zero_division=zero_division)
            values[f"{name}/_macro"] = of_classes.mean()
            values[f"{name}/_weighted"] = ratio(
                (of_classes * support).sum(), support.sum(), zero_division=zero_division
            )
            if self.compute_per_class_metrics:
                values |= by_class(name, of_classes)
        return values | (by_class("support", support) if self.compute_per_class_metrics else {})


class PrecisionRecallF1SupportMetric(_PrecisionRecallMetric):
    """Values ``precision/_micro``, ``/_macro``, ``/_weighted``, and ``recall``, ``f1`` likewise, of a classifier.

    Averages are over all C classes, as in scikit-learn with ``labels=range(C)``; ``_weighted`` ones by support, the
    number of samples of a class. Update with logits (N, C, ...) or class indices (N, ...), and targets (N, ...) int64;
    or with the scores of a binary classifier, (N, ...) or (N, 1, ...) float. Its classes are 0 and 1, so scikit-learn's
    binary values are those of class 1, such as ``f1/class_01``.

    Args:
        num_classes: C; None takes it from the logits.
        zero_division: the value if a denominator is 0.
        threshold: a binary classifier's scores above it are class 1; 0 for logits, 0.5 for probabilities.
        compute_per_class_metrics: also ``f1/class_00`` and so on, and ``support/class_00``.
        prefix, suffix: added to the names.

    >>> import torch
    >>> metric = PrecisionRecallF1SupportMetric(num_classes=2)
    >>> metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    >>> metric.compute_key_value()["recall/_macro"]
    0.75
    """

    def count(self, outputs: Tensor, targets: Tensor) -> Sums:
        return _counts(outputs, targets, self.num_classes, self.threshold)

    def check_total(self, sums: Sums) -> None:
        num_outside = {"targets": sums["support"][-1], "outputs": sums["predicted"][-1]}
        check_all_classes(num_outside, num_classes=len(sums["support"]) - 1)

    def _valid(self, sums: Sums) -> Sums:
        return {name: each[:-1] for name, each in sums.items()}


class MultilabelPrecisionRecallF1SupportMetric(_PrecisionRecallMetric):
    """Precision, recall and F1 of scores (N, C) against 0/1 targets (N, C), by the same names.

    A target above 0.5, for example smoothed, is 1.

    Args:
        num_classes: C, checked if given.
        zero_division: the value if a denominator is 0.
        threshold: scores above it are positive, by default 0.5; pass 0 for logits.
        compute_per_class_metrics, prefix, suffix: see :class:`PrecisionRecallF1SupportMetric`.

    >>> import torch
    >>> metric = MultilabelPrecisionRecallF1SupportMetric()
    >>> metric.update(torch.tensor([[0.9, 0.6]]), torch.tensor([[1, 0]]))
    >>> metric.compute_key_value()["precision/_micro"]
    0.5
    """

    default_threshold = 0.5

    def count(self, scores: Tensor, targets: Tensor) -> Sums:
        check_multilabel(scores, targets)
        if self.num_classes not in (None, scores.shape[1]):
            raise ValueError(f"scores have {scores.shape[1]} classes, num_classes is {self.num_classes}")
        assert self.threshold is not None
        predicted, right = is_above(scores, self.threshold), targets > 0.5
        counts = {"hits": predicted & right, "predicted": predicted, "support": right}
        return {name: each.sum(dim=0) for name, each in counts.items()} | {
            "outside": num_outside(targets, of="targets")
        }

    def check_total(self, sums: Sums) -> None:
        check_none_outside(sums.get("outside", 0), of="targets")


def _counts(outputs: Tensor, targets: Tensor, num_classes: int | None, threshold: float | None) -> Sums:
    predicted, targets, num_classes = class_indices(outputs, targets, num_classes=num_classes, threshold=threshold)
    num_bins = num_classes + 1  # the last counts invalid indices
    return {
        "hits": count_indices(targets, num_classes=num_bins, weights=predicted == targets),
        "predicted": count_indices(predicted, num_classes=num_bins),
        "support": count_indices(targets, num_classes=num_bins),
    }


def _parts(counts: Sums, beta: float = 1) -> dict[str, tuple[Tensor, Tensor]]:
    """Return numerator and denominator of precision, recall and F."""
    hits, predicted, support, square = counts["hits"], counts["predicted"], counts["support"], beta**2
    return {
        "precision": (hits, predicted),
        "recall": (hits, support),
        "f1": ((1 + square) * hits, predicted + square * support),
    }
