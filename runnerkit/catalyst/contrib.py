"""Parts of Catalyst's contrib whose arguments differ from those of `runnerkit.contrib` and pytorch-metric-learning."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from runnerkit.contrib.datasets import images
from runnerkit.contrib.transforms import Compose, ImageToTensor, NormalizeImage

__all__ = ["MNIST", "NTXentLoss"]


class MNIST(images.MNIST):
    """The :class:`.MNIST` of ``runnerkit.contrib`` with Catalyst's argument for arrays.

    Args:
        root, train, download, normalize: as there.
        numpy: images are (H, W) arrays instead of (1, H, W) tensors: uint8 if `normalize` is None, else float32.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        download: bool = True,
        normalize: tuple[float, float] | None = images.DIGITS,
        numpy: bool = False,
    ) -> None:
        steps: list[Any] = [] if normalize is None else [ImageToTensor(), NormalizeImage(*normalize), torch.squeeze]
        transform = Compose([*steps, np.asarray]) if numpy else None
        super().__init__(root, train, download, transform, normalize)


class NTXentLoss(nn.Module):
    """Normalized temperature-scaled cross entropy of two views of each sample, from pytorch-metric-learning.

    Args:
        tau: temperature.
        reduction: over the two views of all samples, "mean" or "sum".
    Raises:
        ImportError: pytorch-metric-learning is not installed.
        ValueError: another `reduction`.

    >>> NTXentLoss(tau=0.1)(torch.eye(2), torch.eye(2)).item() < 1e-3  # each is closest to its other view
    True
    """

    def __init__(self, tau: float, reduction: Literal["mean", "sum"] = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum"):
            raise ValueError(f"NTXentLoss: reduction must be 'mean' or 'sum', got {reduction!r}")
        from pytorch_metric_learning import losses, reducers  # slow to import

        reducer = reducers.MeanReducer() if reduction == "mean" else reducers.SumReducer()
        # With one other view the value of NTXentLoss, whose memory grows with the cube of the batch size.
        self._loss = losses.SelfSupervisedLoss(losses.SupConLoss(temperature=tau, reducer=reducer))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        """Return the loss of two views, (batch, features) each."""
        loss: Tensor = self._loss(left, right)
        return loss
