"""Overlap of masks: IoU (Jaccard), Dice (F1) and the Tversky index, which generalizes both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from runnerkit.callbacks.metrics.parts.class_indices import numbered_classes
from runnerkit.callbacks.metrics.parts.loader_sums import LoaderSumsCallback, Sums, ratio, widest
from runnerkit.support.arguments import check_integers, check_names, check_numbers

__all__ = ["DiceCallback", "IOUCallback", "TrevskyCallback"]


class _OverlapCallback(LoaderSumsCallback, ABC):
    name: str

    def __init__(
        self,
        input_key: str,
        target_key: str,
        class_dim: int = 1,
        weights: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        threshold: float | None = None,
        *,
        log_on_batch: bool = True,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        super().__init__(
            input_key=input_key, target_key=target_key, log_on_batch=log_on_batch, prefix=prefix, suffix=suffix
        )
        check_integers(self, least=None, class_dim=class_dim)
        check_names(self, or_none=True, class_names=class_names)
        check_numbers(self, or_none=True, threshold=threshold)
        if weights is not None and (isinstance(weights, str) or not hasattr(weights, "__len__")):
            raise TypeError(f"{type(self).__name__}: weights must be a list of numbers or None, got {weights!r}")
        self.class_dim, self.weights, self.class_names, self.threshold = class_dim, weights, class_names, threshold
        self.compute_per_class_metrics = compute_per_class_metrics
        self.provides = tuple(f"{self.prefix}{self.name}{self.suffix}{each}" for each in ("", "/_macro", "/_micro"))

    @abstractmethod
    def parts(self, hits: Tensor, false_alarms: Tensor, misses: Tensor) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator of the index."""

    def count(self, *inputs: Tensor) -> Sums:
        outputs, targets = inputs
        if outputs.shape != targets.shape or not -outputs.ndim <= self.class_dim < outputs.ndim:
            raise ValueError(
                f"expected outputs and 0/1 targets of the same shape with classes in dimension {self.class_dim}, got "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}"
            )
        for name, given in (("weights", self.weights), ("class_names", self.class_names)):
            if given is not None and len(given) != outputs.shape[self.class_dim]:
                raise ValueError(f"{name} has {len(given)} entries for {outputs.shape[self.class_dim]} classes")
        if self.threshold is not None:  # exact counts
            outputs, targets = outputs > self.threshold, targets > 0.5
            hits = outputs & targets
        else:
            outputs, targets = widest(outputs), widest(targets)
            hits = outputs * targets
        sums = {"hits": hits, "predicted": outputs, "support": targets}
        return {name: each.movedim(self.class_dim, 0).flatten(1).sum(dim=1) for name, each in sums.items()}

    def values(self, sums: Sums) -> Sums:
        of_classes, micro = self._index(sums), self._index({name: each.sum() for name, each in sums.items()})
        macro = of_classes.mean()
        values = {self.name: macro, f"{self.name}/_macro": macro, f"{self.name}/_micro": micro}
        if self.weights is not None:
            values[f"{self.name}/_weighted"] = sum(
                (weight * each for weight, each in zip(self.weights, of_classes, strict=True)), torch.zeros_like(macro)
            )
        if self.compute_per_class_metrics:
            names = self.class_names or numbered_classes(len(of_classes))
            values |= {f"{self.name}/{name}": each for name, each in zip(names, of_classes, strict=True)}
        return values

    def _index(self, sums: Sums) -> Tensor:
        hits, predicted, support = (widest(sums[name]) for name in ("hits", "predicted", "support"))
        numerator, denominator = self.parts(hits, predicted - hits, support - hits)
        return ratio(numerator, denominator, zero_division=1)


class IOUCallback(_OverlapCallback):
    """Log ``iou``, the mean over classes of hits / (hits + false alarms + misses), and ``iou/_micro`` of all pixels.

    A class absent from outputs and targets has 1. A loader's value covers all its pixels; it is not a mean of images.

    Args:
        input_key: probabilities or masks (N, C, ...) in ``runner.batch``.
        target_key: 0/1 masks of the same shape in ``runner.batch``.
        class_dim: dimension of the classes.
        weights: weights of the classes; logs ``iou/_weighted``, the sum of weight * value.
        class_names: names for `compute_per_class_metrics`, by default ``class_00`` and so on.
        threshold: probabilities above it are positive; None uses the probabilities themselves (soft overlap).
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        compute_per_class_metrics: also log ``iou/NAME`` for each class.
        prefix, suffix: added to the names.

    >>> IOUCallback("masks", "targets", threshold=0.5).provides
    ('iou', 'iou/_macro', 'iou/_micro')
    """

    name = "iou"

    def parts(self, hits: Tensor, false_alarms: Tensor, misses: Tensor) -> tuple[Tensor, Tensor]:
        return hits, hits + false_alarms + misses


class DiceCallback(_OverlapCallback):
    """Log ``dice``, 2 * hits / (2 * hits + false alarms + misses); arguments as in :class:`IOUCallback`.

    >>> DiceCallback("masks", "targets").provides
    ('dice', 'dice/_macro', 'dice/_micro')
    """

    name = "dice"

    def parts(self, hits: Tensor, false_alarms: Tensor, misses: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * hits, 2 * hits + false_alarms + misses


class TrevskyCallback(_OverlapCallback):
    """Log ``trevsky``, the Tversky index hits / (hits + beta * false alarms + alpha * misses).

    Args:
        input_key, target_key: see :class:`IOUCallback`, also for the other arguments.
        alpha: weight of misses.
        beta: weight of false alarms; by default 1 - alpha, for an `alpha` in (0, 1).

    >>> TrevskyCallback("masks", "targets", alpha=0.3).beta
    0.7
    """

    name = "trevsky"

    def __init__(
        self,
        input_key: str,
        target_key: str,
        alpha: float,
        beta: float | None = None,
        class_dim: int = 1,
        weights: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        threshold: float | None = None,
        *,
        log_on_batch: bool = True,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        check_numbers(self, alpha=alpha)
        check_numbers(self, or_none=True, beta=beta)
        if beta is None and not 0 < alpha < 1:
            raise ValueError(
                f"TrevskyCallback: alpha must be in (0, 1) for beta to be 1 - alpha, got {alpha}; or pass beta="
            )
        self.alpha, self.beta = alpha, 1 - alpha if beta is None else beta
        super().__init__(
            input_key, target_key, class_dim, weights, class_names, threshold, log_on_batch=log_on_batch,
            compute_per_class_metrics=compute_per_class_metrics, prefix=prefix, suffix=suffix,
        )  # fmt: skip

    def parts(self, hits: Tensor, false_alarms: Tensor, misses: Tensor) -> tuple[Tensor, Tensor]:
        return hits, hits + self.beta * false_alarms + self.alpha * misses
