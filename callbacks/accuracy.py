"""Top-k accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from runnerkit.arguments import check_integers
from runnerkit.callbacks.loader_sums import LoaderSumsCallback, Sums
from runnerkit.callbacks.topk import checked_topk
from runnerkit.metrics import topk_hits


class AccuracyCallback(LoaderSumsCallback):
    """Log ``accuracy01``, ``accuracy03`` and so on; and ``accuracy``, which is top-1, if 1 is among `topk`.

    A loader's value is the share of its rows, over all processes: hits and rows are counted, also where a batch's rows
    are no samples (tokens, boxes) and batches have different numbers of them.

    Args:
        input_key: logits (N, C) in ``runner.batch``.
        target_key: class indices (N,) int64 in ``runner.batch``.
        topk: each k in [1, C], or one; by default 1, and 3 and 5 where `num_classes` is larger.
        num_classes: C, for the default of `topk`.
        log_on_batch: whether ``runner.batch_metrics`` gets the batch's values.
        prefix, suffix: around the names.
    Raises:
        ValueError: a k is larger than the number of classes, or a batch has other shapes.

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
            shares[name] = sums[name] / float(sums["num"] or 1)  # an int would be cast by an operation of its own
        if 1 in self.topk:
            shares["accuracy"] = shares["accuracy01"]
        return shares


def _topk(owner: object, topk: int | Iterable[int] | None, num_classes: int | None) -> tuple[int, ...]:
    if topk is None:
        return tuple(k for k in (1, 3, 5) if k == 1 or (num_classes is not None and k < num_classes))
    ks = checked_topk(owner, topk)
    if num_classes is not None and max(ks) > num_classes:
        raise ValueError(f"{type(owner).__name__}: topk {ks} asks for more than the {num_classes} classes there are")
    return ks
