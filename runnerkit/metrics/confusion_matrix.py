"""Confusion matrix."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from runnerkit.metrics.class_indices import check_all_classes, class_indices, count_indices, numbered_classes
from runnerkit.metrics.metric import Sums, SumsMetric
from runnerkit.support.arguments import check_integers, check_names, check_numbers, check_strings
from runnerkit.types import Metrics

__all__ = ["ConfusionMatrixMetric"]


class ConfusionMatrixMetric(SumsMetric):
    """Counts of the predicted classes of each true class, by name ``confusion_matrix/TRUE_as_PREDICTED``.

    Update with logits (N, C, ...) or class indices (N, ...), and targets (N, ...) int64; or with the scores of a binary
    classifier, (N, ...) or (N, 1, ...) float.

    Args:
        num_classes: C; pass this or `class_names`.
        class_names: names of the C classes; by default ``class_00`` and so on.
        threshold: a binary classifier's scores above it are class 1; 0 for logits, 0.5 for probabilities.
        prefix: of the names, by default ``confusion_matrix``.

    >>> metric = ConfusionMatrixMetric(2)
    >>> metric.update(torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0]))
    >>> metric.compute()
    tensor([[1, 1],
            [0, 1]])
    """

    def __init__(
        self,
        num_classes: int | None = None,
        class_names: Sequence[str] | None = None,
        *,
        threshold: float | None = None,
        prefix: str | None = None,
    ) -> None:
        check_names(self, or_none=True, class_names=class_names)
        check_integers(self, or_none=True, num_classes=num_classes)
        check_numbers(self, or_none=True, threshold=threshold)
        check_strings(self, or_none=True, prefix=prefix)
        if class_names is None and num_classes is None:
            raise ValueError(f"{type(self).__name__}: pass class_names= or num_classes=")
        if class_names is not None and num_classes not in (None, len(class_names)):
            raise ValueError(
                f"{type(self).__name__}: class_names has {len(class_names)} entries for num_classes={num_classes}"
            )
        self.class_names = list(class_names) if class_names is not None else numbered_classes(num_classes or 0)
        self.threshold = threshold
        pairs = [f"{true}_as_{predicted}" for true in self.class_names for predicted in self.class_names]
        if len({*pairs}) < len(pairs):
            raise ValueError(f"{type(self).__name__}: class_names must differ, got {self.class_names}")
        super().__init__(f"{prefix or 'confusion_matrix'}/{each}" for each in pairs)

    def count(self, outputs: Tensor, targets: Tensor) -> Sums:
        predicted, targets, size = class_indices(
            outputs, targets, num_classes=len(self.class_names), threshold=self.threshold
        )
        size += 1  # the last row and column count invalid indices
        pairs = count_indices(targets * size + predicted, num_classes=size * size)
        return {"counts": pairs.reshape(size, size)}

    def check_total(self, sums: Sums) -> None:
        counts = sums["counts"]
        num_outside = {"targets": counts[-1].sum(), "outputs": counts[:, -1].sum()}
        check_all_classes(num_outside, num_classes=len(counts) - 1)

    def compute_key_value(self) -> Metrics:
        if self.is_empty:
            return super().compute_key_value()
        counts = self.compute().reshape(-1).double().tolist()  # not one tensor for each of C * C names
        return dict(zip(self.names, counts, strict=True))

    def values(self, sums: Sums) -> Sums:
        counts = sums["counts"][:-1, :-1].reshape(-1)
        return dict(zip(self.names, counts.unbind(), strict=True))

    def compute(self) -> Tensor:
        """Return the counts over all batches, (C, C) int64 on the CPU, with true classes in rows.

        Raises:
            ValueError: a class index was outside [0, C).
        """
        if not self._sums:
            return torch.zeros(len(self.class_names), len(self.class_names), dtype=torch.int64)
        self.check_total(self._sums)
        counts: Tensor = self._sums["counts"][:-1, :-1]
        return counts.cpu()
