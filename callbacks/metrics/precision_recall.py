"""Precision, recall, F1 and support, per class and averaged over classes."""

from __future__ import annotations

from torch import Tensor

from runnerkit.callbacks.metrics.parts.class_indices import (
    check_all_classes,
    check_multilabel,
    class_indices,
    count_indices,
    numbered_classes,
)
from runnerkit.callbacks.metrics.parts.loader_sums import LoaderSumsCallback, Sums, ratio
from runnerkit.support.arguments import check_integers, check_numbers

__all__ = ["MultilabelPrecisionRecallF1SupportCallback", "PrecisionRecallF1SupportCallback"]


class PrecisionRecallF1SupportCallback(LoaderSumsCallback):
    """Log ``precision/_micro``, ``/_macro``, ``/_weighted``, and ``recall``, ``f1`` likewise, of a classifier.

    Averages are over all C classes, as in scikit-learn with ``labels=range(C)``; ``_weighted`` ones by support, the
    number of samples of a class.

    Args:
        input_key: logits (N, C, ...) in ``runner.batch``, or class indices (N, ...), which need `num_classes`.
        target_key: class indices (N, ...) int64 in ``runner.batch``.
        num_classes: C; None takes it from the logits.
        zero_division: the value if a denominator is 0.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        compute_per_class_metrics: also log ``f1/class_00`` and so on, and ``support/class_00``.
        prefix, suffix: added to the names.

    >>> PrecisionRecallF1SupportCallback("logits", "targets", prefix="my_").provides[:2]
    ('my_precision/_micro', 'my_precision/_macro')
    """

    def __init__(
        self,
        input_key: str,
        target_key: str,
        num_classes: int | None = None,
        zero_division: float = 0,
        *,
        log_on_batch: bool = True,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(
            input_key=input_key, target_key=target_key, log_on_batch=log_on_batch, prefix=prefix, suffix=suffix
        )
        check_integers(self, or_none=True, num_classes=num_classes)
        check_numbers(self, zero_division=zero_division)
        self.num_classes, self.zero_division = num_classes, zero_division
        self.compute_per_class_metrics = compute_per_class_metrics
        self.provides = _names(self.prefix, self.suffix)

    def count(self, *inputs: Tensor) -> Sums:
        predicted, targets, num_classes = class_indices(*inputs, num_classes=self.num_classes)
        num_bins = num_classes + 1  # the last counts invalid indices
        return {
            "hits": count_indices(targets, num_classes=num_bins, weights=predicted == targets),
            "predicted": count_indices(predicted, num_classes=num_bins),
            "support": count_indices(targets, num_classes=num_bins),
        }

    def check_total(self, sums: Sums, *, loader_key: str) -> None:
        num_outside = {"targets": sums["support"][-1], "outputs": sums["predicted"][-1]}
        check_all_classes(num_outside, num_classes=len(sums["support"]) - 1, loader_key=loader_key)

    def values(self, sums: Sums) -> Sums:
        of_classes = {name: each[:-1] for name, each in sums.items()}
        return _values(of_classes, zero_division=self.zero_division, per_class=self.compute_per_class_metrics)


class MultilabelPrecisionRecallF1SupportCallback(LoaderSumsCallback):
    """Log precision, recall and F1 of scores (N, C) against 0/1 targets (N, C).

    Args:
        input_key: scores (N, C) in ``runner.batch``.
        target_key: 0/1 targets (N, C) in ``runner.batch``.
        num_classes: C, checked if given.
        zero_division: the value if a denominator is 0.
        threshold: scores above it are positive; pass 0 for logits.
        log_on_batch, compute_per_class_metrics, prefix, suffix: see :class:`PrecisionRecallF1SupportCallback`.

    >>> MultilabelPrecisionRecallF1SupportCallback("scores", "targets").provides[-1]
    'f1/_weighted'
    """

    def __init__(
        self,
        input_key: str,
        target_key: str,
        num_classes: int | None = None,
        zero_division: float = 0,
        *,
        threshold: float = 0.5,
        log_on_batch: bool = True,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(
            input_key=input_key, target_key=target_key, log_on_batch=log_on_batch, prefix=prefix, suffix=suffix
        )
        check_integers(self, or_none=True, num_classes=num_classes)
        check_numbers(self, zero_division=zero_division, threshold=threshold)
        self.num_classes, self.zero_division, self.threshold = num_classes, zero_division, threshold
        self.compute_per_class_metrics = compute_per_class_metrics
        self.provides = _names(self.prefix, self.suffix)

    def count(self, *inputs: Tensor) -> Sums:
        scores, targets = inputs
        check_multilabel(scores, targets)
        if self.num_classes not in (None, scores.shape[1]):
            raise ValueError(f"scores have {scores.shape[1]} classes, num_classes is {self.num_classes}")
        predicted, right = scores > self.threshold, targets > 0.5
        counts = {"hits": predicted & right, "predicted": predicted, "support": right}
        return {name: each.sum(dim=0) for name, each in counts.items()}

    def values(self, sums: Sums) -> Sums:
        return _values(sums, zero_division=self.zero_division, per_class=self.compute_per_class_metrics)


def _names(prefix: str, suffix: str) -> tuple[str, ...]:
    averages = ("_micro", "_macro", "_weighted")
    return tuple(f"{prefix}{name}{suffix}/{each}" for name in ("precision", "recall", "f1") for each in averages)


def _values(sums: Sums, *, zero_division: float, per_class: bool) -> Sums:
    """Compute all metrics from hits, predicted and support, (C,) int64 each."""
    hits, predicted, support = sums["hits"], sums["predicted"], sums["support"]
    parts = {"precision": (hits, predicted), "recall": (hits, support), "f1": (2 * hits, predicted + support)}
    values = {}
    for name, (numerator, denominator) in parts.items():
        of_classes = ratio(numerator, denominator, zero_division=zero_division)
        values[f"{name}/_micro"] = ratio(numerator.sum(), denominator.sum(), zero_division=zero_division)
        values[f"{name}/_macro"] = of_classes.mean()
        values[f"{name}/_weighted"] = ratio((of_classes * support).sum(), support.sum(), zero_division=zero_division)
        if per_class:
            values |= _by_class(name, of_classes)
    return values | (_by_class("support", support) if per_class else {})


def _by_class(name: str, values: Tensor) -> Sums:
    names = numbered_classes(len(values))
    return {f"{name}/{each}": value for each, value in zip(names, values, strict=True)}
