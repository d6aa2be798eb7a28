"""Top-k accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from runnerkit.callbacks.metrics.parts.loader_sums import LoaderSumsCallback, Sums
from runnerkit.callbacks.metrics.parts.topk import checked_topk
from runnerkit.metrics.means import topk_hits
from runnerkit.support.arguments import check_integers

__all__ = ["AccuracyCallback"]


class AccuracyCallback(LoaderSumsCallback):
    """Log ``accuracy01``, ``accuracy03`` and so on, and top-1 also as ``accuracy`` if 1 is in `topk`.

    A loader's value is the fraction of correct rows over all processes, from counts of hits and rows. Rows need not be
    samples (tokens, boxes), and batches may have different numbers of them.

    Args:
        input_key: logits (N, C) in ``runner.batch``.
        target_key: class indices (N,) int64 in ``runner.batch``.
        topk: one or several k in [1, C]; by default 1, and 3 and 5 if `num_classes` is larger.
        num_classes: C, for the default of `topk`.
        log_on_batch: whether to put the batch's values into ``runner.batch_metrics``.
        prefix, suffix: added to the names.
    Raises:
        ValueError: a k exceeds the number of classes, or a batch has wrong shapes.

    >>> AccuracyCallback("logits", "targets", topk=(1, 3)).provides
    ('accuracy01', 'accuracy03', 'accuracy')
    """

    def __init__(
        self,
        input_key: str,
        target_key: str,
        topk: int | Iterable[int] | None = None,
        num_classes: int | None = None,
        *,
        log_on_batch: bool = True,
        prefix: str | None = "",
        suffix: str | None = "",
    ) -> None:
        super().__init__(
            input_key=input_key, target_key=target_key, log_on_batch=log_on_batch, prefix=prefix, suffix=suffix
        )
        check_integers(self, or_none=True, num_classes=num_classes)
        self.topk = _topk(self, topk, num_classes)
        self._names = [f"accuracy{k:02d}" for k in self.topk]
        names = self._names + ["accuracy"] * (1 in self.topk)
        self.provides = tuple(f"{self.prefix}{name}{self.suffix}" for name in names)

    def count(self, *inputs: Tensor) -> Sums:
        logits, targets = inputs
        sums: Sums = dict(zip(self._names, topk_hits(logits, targets, self.topk), strict=True))
        sums["num"] = targets.shape[0]
        return sums

    def values(self, sums: Sums) -> Sums:
        shares = {}
        for name in self._names:
            shares[name] = sums[name] / float(sums["num"] or 1)  # dividing by an int would launch an extra cast
        if 1 in self.topk:
            shares["accuracy"] = shares["accuracy01"]
        return shares


def _topk(owner: object, topk: int | Iterable[int] | None, num_classes: int | None) -> tuple[int, ...]:
    if topk is None:
        return tuple(k for k in (1, 3, 5) if k == 1 or (num_classes is not None and k < num_classes))
    ks = checked_topk(owner, topk)
    if num_classes is not None and max(ks) > num_classes:
        raise ValueError(f"{type(owner).__name__}: topk {ks} exceeds the {num_classes} classes")
    return ks
