"""Accuracy of multilabel classification."""

from __future__ import annotations

import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.class_indices import check_multilabel
from runnerkit.callbacks.metrics.parts.loader_sums import LoaderSumsCallback, Sums, ratio
from runnerkit.support.arguments import check_numbers

__all__ = ["MultilabelAccuracyCallback"]


class MultilabelAccuracyCallback(LoaderSumsCallback):
    """Log ``accuracy``: the fraction of correct decisions among all N * C pairs of sample and label.

    Args:
        input_key: scores (N, C) in ``runner.batch``.
        target_key: 0/1 targets (N, C) in ``runner.batch``.
        threshold: scores above it are positive; a number, or a (C,) tensor with one per class. Pass 0 for logits.
        log_on_batch: whether to put the batch's value into ``runner.batch_metrics``.
        prefix, suffix: added to the name.

    >>> MultilabelAccuracyCallback("scores", "targets", prefix="tag_").provides
    ('tag_accuracy',)
    """

    def __init__(
        self,
        input_key: str,
        target_key: str,
        threshold: float | Tensor = 0.5,
        *,
        log_on_batch: bool = True,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(
            input_key=input_key, target_key=target_key, log_on_batch=log_on_batch, prefix=prefix, suffix=suffix
        )
        if not isinstance(threshold, Tensor):
            check_numbers(self, threshold=threshold)
        self.threshold = threshold
        self.provides = (f"{self.prefix}accuracy{self.suffix}",)

    def count(self, *inputs: Tensor) -> Sums:
        scores, targets = inputs
        check_multilabel(scores, targets)
        threshold = self.threshold
        if isinstance(threshold, Tensor):
            self.threshold = threshold = threshold.to(scores.device)  # copied once
        right = (scores > threshold) == (targets > 0.5)
        return {"right": right.sum(), "all": right.new_full((), right.numel(), dtype=torch.int64)}

    def values(self, sums: Sums) -> Sums:
        return {"accuracy": ratio(sums["right"], sums["all"], zero_division=0)}
