"""Mixup: convex combinations of samples and of their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.distributions import Beta

from runnerkit.callback import Callback, CallbackOrder
from runnerkit.errors import UnknownKeyError
from runnerkit.support.arguments import check_names, check_numbers
from runnerkit.support.deprecation import Renamed, accepts_old_names

if TYPE_CHECKING:
    from runnerkit.runner import IRunner

__all__ = ["MixupCallback"]


class MixupCallback(Callback):
    """Mix each sample with the next one of the batch: share * sample + (1 - share) * next. arXiv:1710.09412

    Targets are mixed too, so they must be floating-point, such as one-hot vectors. Metrics that count hits, such as
    accuracy, need a ``ControlFlowCallback(..., ignore_loaders="train")``. With several processes, samples of the same
    process are mixed.

    Args:
        keys: parts of the batch to mix with the same shares, (N, ...) float each.
        alpha: the shares, one per sample, have the distribution Beta(alpha, alpha); 0 mixes nothing.
        output: "replace" the samples, or "add" the mixed ones behind them, which doubles the batch.
        on_train_only: leave evaluation as it is.

    >>> MixupCallback(["features", "targets"], alpha=0.4).keys
    ['features', 'targets']
    """

    shapes_training = True

    @accepts_old_names(Renamed("mode", "output"))
    def __init__(
        self,
        keys: str | Sequence[str],
        alpha: float = 0.2,
        output: Literal["replace", "add"] = "replace",
        on_train_only: bool = True,
    ) -> None:
        super().__init__(order=CallbackOrder.Internal)
        check_names(self, keys=[keys] if isinstance(keys, str) else keys)
        self.keys = [keys] if isinstance(keys, str) else list(keys)
        check_numbers(self, alpha=alpha)
        if alpha < 0:
            raise ValueError(f"MixupCallback: alpha must be >= 0, got {alpha}")
        if output not in ("replace", "add"):
            raise ValueError(f"MixupCallback: output must be 'replace' or 'add', got {output!r}")
        self.alpha, self.output, self.on_train_only = alpha, output, on_train_only

    def on_batch_start(self, runner: IRunner) -> None:
        if self.alpha == 0 or (self.on_train_only and not runner.is_train_loader):
            return
        batch = runner.batch
        if not isinstance(batch, dict) or not all(key in batch for key in self.keys):
            have = list(batch) if isinstance(batch, dict) else f"a {type(batch).__name__}"
            raise UnknownKeyError(f"MixupCallback mixes {self.keys} of a batch, which has {have}")
        shares = self.draw(len(batch[self.keys[0]]))
        runner.batch = {**batch, **{key: self._mixed(key, batch[key], shares) for key in self.keys}}

    def draw(self, num_samples: int) -> Tensor:
        """Draw the shares of a batch's samples, (N,)."""
        return Beta(self.alpha, self.alpha).sample((num_samples,))

    def _mixed(self, key: str, values: Tensor, shares: Tensor) -> Tensor:
        if not values.is_floating_point():
            raise TypeError(f"MixupCallback: {key!r} is {values.dtype}, which cannot be mixed; use one-hot vectors")
        weights = shares.to(values).reshape(-1, *[1] * (values.ndim - 1))
        mixed = weights * values + (1 - weights) * values.roll(-1, dims=0)
        return mixed if self.output == "replace" else torch.cat([values, mixed])
