"""A sampler whose classes become more balanced with every epoch."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Literal

from torch.utils.data import Sampler

from runnerkit.data.class_positions import Labels, draw, indices_by_class, shuffled
from runnerkit.support.deprecation import Renamed, accepts_old_names

__all__ = ["DynamicBalanceClassSampler"]

logger = logging.getLogger(__name__)

FEW_SAMPLES = 100  # per class in the last epochs; fewer are warned about


class DynamicBalanceClassSampler(Sampler[int]):
    """A sampler that shrinks common classes towards the size of the rarest one, epoch by epoch.

    A class D times as large as the rarest has ``D ** (exp_lambda ** e)`` times its size after e epochs (Wang et al.
    2019, arXiv:1901.06783). The first epoch is the unchanged data set; the last ones are balanced.
    The engine calls ``set_epoch`` with 1, 2, ...; a hand-written loop must call it.

    Args:
        labels: (N,) one label per sample of the data set.
        exp_lambda: in (0, 1); smaller shrinks faster.
        start_epoch: number of epochs of shrinking before the first epoch.
        max_d: upper bound of ``D ** (exp_lambda ** e)``.
        strategy: "downsampling" to the size of the rarest class, or a number of samples per class.
        ignore_warning: do not warn when the last epochs have fewer than 100 samples per class.

    >>> sampler = DynamicBalanceClassSampler([0] * 90 + [1] * 10, exp_lambda=0.5, ignore_warning=True)
    >>> for epoch in (1, 2, 3, 50):
    ...     sampler.set_epoch(epoch)
    ...     print(sampler.samples_per_class)
    {0: 90, 1: 10}
    {0: 30, 1: 10}
    {0: 17, 1: 10}
    {0: 10, 1: 10}
    """

    @accepts_old_names(Renamed("mode", "strategy"))
    def __init__(
        self,
        labels: Labels,
        exp_lambda: float = 0.9,
        start_epoch: int = 0,
        max_d: float | None = None,
        strategy: Literal["downsampling"] | int = "downsampling",
        ignore_warning: bool = False,
    ) -> None:
        self.num_labels = len(labels)
        self._indices = indices_by_class(labels)
        self._rarest = min(len(each) for each in self._indices.values())
        if not 0 < exp_lambda < 1:
            raise ValueError(f"exp_lambda must be in (0, 1), got {exp_lambda}")
        if start_epoch < 0:
            raise ValueError(f"start_epoch must be >= 0, got {start_epoch}")
        if max_d is not None and max_d < 1:
            raise ValueError(f"max_d must be >= 1, the balanced share; got {max_d}")
        if strategy != "downsampling" and not (isinstance(strategy, int) and strategy >= 1):
            raise ValueError(f"strategy must be 'downsampling' or a number of samples >= 1, got {strategy!r}")
        self.exp_lambda = exp_lambda
        self.start_epoch = start_epoch
        self.max_d = math.inf if max_d is None else max_d
        self.min_class_size = self._rarest if strategy == "downsampling" else strategy
        if self.min_class_size < FEW_SAMPLES and not ignore_warning:
            logger.warning(
                "the last epochs will have only %d samples of each of the %d classes; "
                "pass ignore_warning=True if this is intended",
                self.min_class_size,
                len(self._indices),
            )
        self.set_epoch(1)

    def set_epoch(self, epoch: int) -> None:
        """Set the class sizes to those of `epoch`, counted from 1; 0 is treated as 1."""
        power = self.exp_lambda ** (self.start_epoch + max(epoch, 1) - 1)
        self.samples_per_class = {
            label: round(min((len(each) / self._rarest) ** power, self.max_d) * self.min_class_size)
            for label, each in self._indices.items()
        }

    def __len__(self) -> int:
        return sum(self.samples_per_class.values())

    def __iter__(self) -> Iterator[int]:
        parts = [draw(each, self.samples_per_class[label]) for label, each in self._indices.items()]
        return iter(shuffled(parts))
