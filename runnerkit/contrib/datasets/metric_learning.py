"""MNIST for metric learning: training digits, and test digits of other classes, as queries and gallery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from runnerkit.contrib.datasets.images import DIGITS, MNIST, Transform

__all__ = ["MnistMLDataset", "MnistQGDataset"]

_SPLIT = 5  # digits below it are for training, the others for evaluation


class MnistMLDataset(MNIST):
    """The training images of the digits 0 to 4; arguments as in :class:`MNIST`, but `train` must be true.

    Raises:
        ValueError: `train` is false; use :class:`MnistQGDataset`.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        download: bool = True,
        transform: Transform | None = None,
        normalize: tuple[float, float] | None = DIGITS,
    ) -> None:
        if not train:
            raise ValueError("MnistMLDataset is for training: use MnistQGDataset for evaluation")
        super().__init__(root, train, download, transform, normalize)
        _keep(self, self.targets < _SPLIT)

    def get_labels(self) -> list[int]:
        """Return the class of each image, for a sampler such as ``BatchBalanceClassSampler``."""
        labels: list[int] = self.targets.tolist()
        return labels


class MnistQGDataset(Dataset[dict[str, Any]]):
    """The test images of the digits 5 to 9; samples are dicts of ``features``, ``targets`` and ``is_query``.

    Args:
        root, download, transform, normalize: as in :class:`MNIST`.
        gallery_fraq: the fraction of images, the last ones, that are the gallery; the others are queries.
    """

    def __init__(
        self,
        root: str | Path,
        gallery_fraq: float = 0.2,
        download: bool = True,
        transform: Transform | None = None,
        normalize: tuple[float, float] | None = DIGITS,
    ) -> None:
        if not 0 < gallery_fraq < 1:
            raise ValueError(f"MnistQGDataset: gallery_fraq must be in (0, 1), got {gallery_fraq}")
        self._mnist = MNIST(root, False, download, transform, normalize)
        _keep(self._mnist, self._mnist.targets >= _SPLIT)
        self.gallery_size = int(gallery_fraq * len(self._mnist))
        self.query_size = len(self._mnist) - self.gallery_size

    def __len__(self) -> int:
        return len(self._mnist)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, target = self._mnist[index]
        return {"features": image, "targets": target, "is_query": torch.tensor(index < self.query_size)}


def _keep(mnist: MNIST, mask: Tensor) -> None:
    mnist.images, mnist.targets = mnist.images[mask], mnist.targets[mask]
