"""How much of the targets' variance a regression explains."""

from __future__ import annotations

import torch
from torch import Tensor

from runnerkit.callbacks.loader_sums import LoaderSumsCallback, Sums, ratio, widest


class R2SquaredCallback(LoaderSumsCallback):
    """Log ``r2squared``: 1 - sum((t - y)^2) / sum((t - mean(t))^2), averaged over the outputs.

    Targets that do not vary have 1 if all are met, else 0; a single one has NaN: all as scikit-learn's ``r2_score``.
    The sums are float64; where the mean of the targets is a million times their deviation, four digits are left.

    Args:
        input_key: y, (N,) or (N, D) float in ``runner.batch``.
        target_key: t, of as many elements, in ``runner.batch``.
        prefix, suffix: around the name.

    >>> R2SquaredCallback("logits", "targets").provides
    ('r2squared',)
    """

    def __init__(
        self, input_key: str, target_key: str, *, prefix: str | None = None, suffix: str | None = None
    ) -> None:
        super().__init__(input_key, target_key, log_on_batch=False, prefix=prefix, suffix=suffix)
        self.provides = (f"{self.prefix}r2squared{self.suffix}",)

    def count(self, *inputs: Tensor) -> Sums:
        outputs, targets = inputs
        if outputs.numel() != targets.numel() or outputs.shape[:1] != targets.shape[:1] or not targets.ndim:
            raise ValueError(f"expected outputs and targets (N, D), got {tuple(outputs.shape)}, {tuple(targets.shape)}")
        targets = widest(targets).reshape(len(targets), -1)
        errors = targets - widest(outputs).reshape(targets.shape)
        return {
            "num": targets.new_full((), len(targets), dtype=torch.int64),
            "targets": targets.sum(dim=0),
            "squares": targets.square().sum(dim=0),
            "errors": errors.square().sum(dim=0),
        }

    def values(self, sums: Sums) -> Sums:
        num, squares, errors = sums["num"], sums["squares"], sums["errors"]
        variation = squares - sums["targets"].square() / num
        is_rounding = variation <= 16 * torch.finfo(squares.dtype).eps * squares
        of_constant = (errors == 0).to(squares.dtype)
        value = torch.where(is_rounding, of_constant, 1 - ratio(errors, variation, zero_division=0)).mean()
        return {"r2squared": torch.where(num < 2, torch.nan, value)}
