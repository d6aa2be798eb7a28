"""CIFAR-10 as the two loaders that a runner takes."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Subset

from runnerkit.contrib import CIFAR10, Compose, ImageToTensor, NormalizeImage

# Per channel, over the 50,000 training images.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def cifar10_loaders(root: str | Path, batch_size: int, limit: int | None = None) -> dict[str, DataLoader[Any]]:
    """Load CIFAR-10 from `root`, downloading it if need be.

    Args:
        root: holds ``cifar-10-batches-py``, or will.
        batch_size: images a batch.
        limit: keep the first so many images of each part, for a quick try.
    Returns:
        "train" (shuffled) and "valid" (the test part), yielding (N, 3, 32, 32) float32 and (N,) int64.
    Raises:
        RuntimeError: the files are neither in `root` nor within reach.
    """
    transform = Compose([ImageToTensor(), NormalizeImage(MEAN, STD)])
    loaders: dict[str, DataLoader[Any]] = {}
    for loader_key in ("train", "valid"):
        training = loader_key == "train"
        images = CIFAR10(root, train=training, download=True, transform=transform)
        count = len(images) if limit is None else min(limit, len(images))
        loaders[loader_key] = DataLoader(Subset(images, range(count)), batch_size=batch_size, shuffle=training)
    return loaders
