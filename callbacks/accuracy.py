"""Top-k accuracy of a classifier."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from runnerkit.callbacks.batch_mean import BatchMeanCallback
from runnerkit.callbacks.keys import pick
from runnerkit.callbacks.topk import checked_topk
from runnerkit.metrics import accuracy
from runnerkit.types import Scalar

if TYPE_CHECKING:
    from runnerkit.runner import IRunner


class AccuracyCallback(BatchMeanCallback):
    """Log ``accuracy01``, ``accuracy03`` and so on, and ``accuracy``, which is the first of these.

    A loader's value is the share of its samples, over all processes.

    Args:
        input_key: logits (N, C) in ``runner.batch``.
        target_key: class indices (N,) int64 in ``runner.batch``.
        topk: each k in [1, C], or one; by default 1, and 3 and 5 where `num_classes` is larger.
        num_classes: C, for the default of `topk`.
        log_on_batch: whether ``runner.batch_metrics`` gets the batch's values.
        prefix, suffix: around the names.

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
        self.topk = _topk(topk, num_classes)
        names = [f"accuracy{k:02d}" for k in self.topk] + ["accuracy"] * (1 in self.topk)
        super().__init__(tuple(f"{prefix or ''}{name}{suffix or ''}" for name in names), log_on_batch=log_on_batch)
        self.input_key, self.target_key = input_key, target_key

    def compute_batch(self, runner: IRunner) -> dict[str, Scalar]:
        (logits, targets), _ = pick(runner, self.input_key, self.target_key, reader="AccuracyCallback")
        values: list[Scalar] = [*accuracy(logits, targets, self.topk)]
        if 1 in self.topk:
            values.append(values[self.topk.index(1)])
        return dict(zip(self.provides, values, strict=True))


def _topk(topk: int | Iterable[int] | None, num_classes: int | None) -> tuple[int, ...]:
    if topk is None:
        return tuple(k for k in (1, 3, 5) if k == 1 or (num_classes is not None and k < num_classes))
    ks = checked_topk(topk)
    if num_classes is not None and max(ks) > num_classes:
        raise ValueError(f"topk {ks} asks for more than the {num_classes} classes there are")
    return ks
