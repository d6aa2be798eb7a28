"""R2, the fraction of the targets' variance that a regression explains."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from runnerkit.metrics.metric import Sums, SumsMetric, ratio, unlike, widest
from runnerkit.metrics.reduction import PartialSums

__all__ = ["R2Metric", "r2"]


def r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Compute 1 - sum((t - y)^2) / sum((t - mean(t))^2), averaged over the outputs.

    For constant targets, it is 1 if all outputs are exact and 0 otherwise; for a single target, NaN. This follows
    scikit-learn's ``r2_score``.

    Args:
        outputs: y, (N,) or (N, D) float.
        targets: t, of the same shape; dimensions of 1 do not count, and (N, D) may be any shape of D elements.
    Returns:
        (), float64 if the device supports it; no host sync.
    Raises:
        ValueError: the shapes do not match, or the batch is empty.

    >>> r2(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    tensor(0.5000, dtype=torch.float64)
    """
    sums = _sums_of(outputs, targets)
    if not sums:
        raise ValueError("r2 needs at least one sample")
    return _r2_of(sums)


class R2Metric(SumsMetric):
    """Value ``r2squared``, of :func:`r2`. Update with outputs and targets, (N,) or (N, D).

    Nine digits are exact even for targets with a large mean, such as times in seconds: the first target is subtracted
    from all. If that is an outlier, precision is lost: one of N targets is at most sqrt(N) deviations from their mean,
    which magnifies rounding by N.

    Args:
        prefix, suffix: added to the name.

    >>> metric = R2Metric()
    >>> metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]))
    >>> metric.update(torch.tensor([4.0]), torch.tensor([3.0]))
    >>> metric.compute()
    0.5
    """

    def __init__(self, *, prefix: str | None = None, suffix: str | None = None) -> None:
        super().__init__(["r2squared"], prefix=prefix, suffix=suffix)

    def count(self, outputs: Tensor, targets: Tensor) -> Sums:
        return _sums_of(outputs, targets)

    def values(self, sums: Sums) -> Sums:
        return {"r2squared": _r2_of(sums)} if sums else {}

    def _add(self, sums: Sums) -> None:
        if self._sums and sums and sums["errors"].shape != self._sums["errors"].shape:
            raise unlike(self, self._sums["errors"].shape, sums["errors"].shape)
        self._sums = _merged(self._sums, sums) if self._sums and sums else self._sums or sums

    def share(self) -> PartialSums | None:
        return PartialSums({}, rows=self._sums) if self._sums else None

    def take(self, total: PartialSums) -> None:
        of_parts = [dict(zip(total.sums, row, strict=True)) for row in zip(*total.sums.values(), strict=True)]
        self._sums = reduce(_merged, (each for each in of_parts if each["num"]))


def _sums_of(outputs: Tensor, targets: Tensor) -> Sums:
    """Sum targets, and their squares, after subtraction of the first target; {} without any; no host sync."""
    shapes = [[size for size in each.shape[1:] if size != 1] for each in (outputs, targets)]
    are_alike = shapes[0] == shapes[1] or min(map(len, shapes)) < 2
    if outputs.numel() != targets.numel() or outputs.shape[:1] != targets.shape[:1] or not (targets.ndim and are_alike):
        raise ValueError(f"expected outputs and targets (N, D), got {tuple(outputs.shape)}, {tuple(targets.shape)}")
    if not len(targets):
        return {}
    outputs, targets = (widest(each.detach()).reshape(len(targets), -1) for each in (outputs, targets))
    shift = targets[0].clone()
    offsets, errors = targets - shift, targets - outputs
    return {
        "shift": shift,
        "num": targets.new_full((), len(targets), dtype=torch.int64),
        "offsets": offsets.sum(dim=0),
        "squares": offsets.square().sum(dim=0),
        "errors": errors.square().sum(dim=0),
    }


def _merged(sums: Sums, others: Sums) -> Sums:
    """Add sums with different shifts; the result has the first one's shift."""
    num, distance = others["num"], others["shift"] - sums["shift"]
    return {
        "shift": sums["shift"],
        "num": sums["num"] + num,
        "offsets": sums["offsets"] + others["offsets"] + num * distance,
        "squares": sums["squares"] + others["squares"] + distance * (2 * others["offsets"] + num * distance),
        "errors": sums["errors"] + others["errors"],
    }


def _r2_of(sums: Sums) -> Tensor:
    variation = (sums["squares"] - sums["offsets"].square() / sums["num"]).clamp(min=0)
    of_constant = (sums["errors"] == 0).to(variation.dtype)
    values = torch.where(variation == 0, of_constant, 1 - ratio(sums["errors"], variation, zero_division=0))
    return torch.where(sums["num"] < 2, torch.nan, values.mean())
