"""Overlap of masks: IoU (Jaccard), Dice (F1) and the Tversky index, which generalizes both."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from typing import Any

import torch
from torch import Tensor

from runnerkit.metrics.class_indices import by_class, check_none_outside, is_above, num_outside
from runnerkit.metrics.metric import Sums, SumsMetric, ratio, widest
from runnerkit.support.arguments import check_integers, check_names, check_numbers

__all__ = ["DiceMetric", "IOUMetric", "TrevskyMetric", "TverskyMetric", "dice", "iou", "trevsky", "tversky"]


def iou(outputs: Tensor, targets: Tensor, class_dim: int = 1, threshold: float | None = None) -> Tensor:
    """Compute hits / (hits + false alarms + misses) of each class over all its pixels.

    Args:
        outputs: probabilities or masks (N, C, ...), or logits with a threshold of 0.
        targets: 0/1 masks of the same shape.
        class_dim: dimension of the classes.
        threshold: probabilities above it are positive; None uses the probabilities themselves (soft overlap).
    Returns:
        (C,) float64 if the device supports it; 1 for a class absent from outputs and targets; no host sync.
    Raises:
        ValueError: the shapes differ. On the CPU, also if targets, or outputs without a threshold, are outside [0, 1].

    >>> iou(torch.tensor([[1.0, 1.0, 0.0]]), torch.tensor([[1, 0, 0]]))
    tensor([1., 0., 1.], dtype=torch.float64)
    """
    return IOUMetric(class_dim, threshold=threshold).of_classes(outputs, targets)


def dice(outputs: Tensor, targets: Tensor, class_dim: int = 1, threshold: float | None = None) -> Tensor:
    """Compute 2 * hits / (2 * hits + false alarms + misses) of each class; see :func:`iou`.

    >>> dice(torch.tensor([[0.5, 1.0]]), torch.tensor([[1, 1]]))
    tensor([0.6667, 1.0000], dtype=torch.float64)
    """
    return DiceMetric(class_dim, threshold=threshold).of_classes(outputs, targets)


def tversky(
    outputs: Tensor,
    targets: Tensor,
    alpha: float,
    beta: float | None = None,
    class_dim: int = 1,
    threshold: float | None = None,
) -> Tensor:
    """Compute hits / (hits + beta * false alarms + alpha * misses) of each class; see :func:`iou`.

    >>> tversky(torch.tensor([[0.5, 1.0]]), torch.tensor([[1, 1]]), alpha=0.5)
    tensor([0.6667, 1.0000], dtype=torch.float64)
    """
    return TverskyMetric(alpha, beta, class_dim, threshold=threshold).of_classes(outputs, targets)


trevsky = tversky  # the name in Catalyst


class _OverlapMetric(SumsMetric, ABC):
    name: str

    def __init__(
        self,
        class_dim: int = 1,
        weights: Sequence[float] | None = None,
        class_names: Sequence[str] | None = None,
        threshold: float | None = None,
        *,
        compute_per_class_metrics: bool = False,
        prefix: str | None = None,
        suffix: str | None = None,
    ) -> None:
        check_integers(self, least=None, class_dim=class_dim)
        check_names(self, or_none=True, class_names=class_names)
        check_numbers(self, or_none=True, threshold=threshold)
        if class_names is not None and len({*class_names}) < len(class_names):
            raise ValueError(f"{type(self).__name__}: class_names must differ, got {class_names}")
        if weights is not None and (isinstance(weights, str) or not isinstance(weights, Sized)):
            raise TypeError(f"{type(self).__name__}: weights must be a list of numbers or None, got {weights!r}")
        self.class_dim, self.weights, self.class_names, self.threshold = class_dim, weights, class_names, threshold
        self.compute_per_class_metrics = compute_per_class_metrics
        super().__init__([f"{self.name}{each}" for each in ("", "/_macro", "/_micro")], prefix=prefix, suffix=suffix)

    @abstractmethod
    def parts(self, hits: Tensor, false_alarms: Tensor, misses: Tensor) -> tuple[Tensor, Tensor]:
        """Return numerator and denominator of the index."""

    def of_classes(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the index of each class of one batch, (C,), without adding the batch."""
        return self._index(self.count(outputs, targets))

    def count(self, outputs: Tensor, targets: Tensor) -> Sums:
        outputs = outputs.detach()
        if outputs.shape != targets.shape or not -outputs.ndim <= self.class_dim < outputs.ndim:
            raise ValueError(
                f"expected outputs and 0/1 targets of the same shape with classes in dimension {self.class_dim}, got "
                f"{tuple(outputs.shape)} and {tuple(targets.shape)}"
            )
        for name, given in (("weights", self.weights), ("class_names", self.class_names)):
            if given is not None and len(given) != outputs.shape[self.class_dim]:
                raise ValueError(f"{name} has {len(given)} entries for {outputs.shape[self.class_dim]} classes")
        outside = {"outside_targets": num_outside(targets, of="targets")}
        if self.threshold is not None:  # exact counts
            outputs, targets = is_above(outputs, self.threshold), targets > 0.5
            hits = outputs & targets
        else:
            outside["outside_outputs"] = num_outside(outputs, of="outputs")
            outputs, targets = widest(outputs), widest(targets.detach())
            hits = outputs * targets
        sums = {"hits": hits, "predicted": outputs, "support": targets}
        return outside | {name: each.movedim(self.class_dim, 0).flatten(1).sum(dim=1) for name, each in sums.items()}

    def check_total(self, sums: Sums) -> None:
        for name in ("targets", "outputs"):
            check_none_outside(sums.get(f"outside_{name}", 0), of=name)

    def values(self, sums: Sums) -> Sums:
        sums = {name: sums[name] for name in ("hits", "predicted", "support")}
        of_classes, micro = self._index(sums), self._index({name: each.sum() for name, each in sums.items()})
        macro = of_classes.mean()
        values = {self.name: macro, f"{self.name}/_macro": macro, f"{self.name}/_micro": micro}
        if self.weights is not None:
            values[f"{self.name}/_weighted"] = sum(
                (weight * each for weight, each in zip(self.weights, of_classes, strict=True)), torch.zeros_like(macro)
            )
        if self.compute_per_class_metrics:
            values |= by_class(self.name, of_classes, self.class_names)
        return values

    def _index(self, sums: Sums) -> Tensor:
        hits, predicted, support = (widest(sums[name]) for name in ("hits", "predicted", "support"))
        numerator, denominator = self.parts(hits, predicted - hits, support - hits)
        return ratio(numerator, denominator, zero_division=1)


class IOUMetric(_OverlapMetric):
    """Values ``iou`` and ``iou/_macro``, the mean over classes of :func:`iou`, and ``iou/_micro`` of all pixels.

    A value covers all pixels of the data set; it is not a mean of images. Update with outputs and targets.

    Args:
        class_dim: dimension of the classes.
        weights: weights of the classes; also ``iou/_weighted``, the sum of weight * value.
        class_names: names for `compute_per_class_metrics`, by default ``class_00`` and so on.
        threshold: probabilities above it are positive; None uses the probabilities themselves (soft overlap).
        compute_per_class_metrics: also ``iou/NAME`` for each class.
        prefix, suffix: added to the names.

    >>> metric = IOUMetric(threshold=0.5)
    >>> metric.update(torch.tensor([[0.9, 0.8]]), torch.tensor([[1, 0]]))
    >>> metric.compute_key_value()
    {'iou': 0.5, 'iou/_macro': 0.5, 'iou/_micro': 0.5}
    """

    name = "iou"

    def parts(self, hits: Tensor, false_alarms: Tensor, misses: Tensor) -> tuple[Tensor, Tensor]:
        return hits, hits + false_alarms + misses


class DiceMetric(_OverlapMetric):
    """Values ``dice``, of :func:`dice`; arguments as in :class:`IOUMetric`.

    >>> DiceMetric().names
    ('dice', 'dice/_macro', 'dice/_micro')
    """

    name = "dice"

    def parts(self, hits: Tensor, false_alarms: Tensor, misses: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * hits, 2 * hits + false_alarms + misses


class TverskyMetric(_OverlapMetric):
    """Values ``tversky``, the Tversky index of :func:`tversky`.

    Args:
        alpha: weight of misses.
        beta: weight of false alarms; by default 1 - alpha, for an `alpha` in (0, 1).
        *arguments, **named: those of :class:`IOUMetric`.

    >>> TverskyMetric(alpha=0.3).beta
    0.7
    """

    name = "tversky"

    def __init__(self, alpha: float, beta: float | None = None, *arguments: Any, **named: Any) -> None:
        check_numbers(self, alpha=alpha)
        check_numbers(self, or_none=True, beta=beta)
        if beta is None and not 0 < alpha < 1:
            raise ValueError(
                f"{type(self).__name__}: alpha must be in (0, 1) for beta to be 1 - alpha, got {alpha}; or pass beta="
            )
        self.alpha, self.beta = alpha, 1 - alpha if beta is None else beta
        super().__init__(*arguments, **named)

    def parts(self, hits: Tensor, false_alarms: Tensor, misses: Tensor) -> tuple[Tensor, Tensor]:
        return hits, hits + self.beta * false_alarms + self.alpha * misses


class TrevskyMetric(TverskyMetric):
    """:class:`TverskyMetric` under the name that it has in Catalyst; its values are named ``trevsky``."""

    name = "trevsky"
