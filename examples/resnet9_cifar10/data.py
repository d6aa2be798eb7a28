"""Training and validation loaders for CIFAR-10."""

from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader, Subset

from runnerkit.contrib import CIFAR10, Compose, ImageToTensor, NormalizeImage

# Per channel, over the 50,000 training images.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def cifar10_loaders(root: str | Path, batch_size: int, limit: int | None = None) -> dict[str, DataLoader[Any]]:
    """Load CIFAR-10 from `root`, and download it if missing.

    Args:
        root: folder that contains ``cifar-10-batches-py``, or receives it.
        batch_size: images per batch.
        limit: use only the first `limit` images of each part, for a quick test.
    Returns:
        "train" (shuffled) and "valid" (the test part), yielding (N, 3, 32, 32) float32 and (N,) int64.
    Raises:
        RuntimeError: the files are not in `root` and cannot be downloaded.
    """
    transform = Compose([ImageToTensor(), NormalizeImage(MEAN, STD)])
    loaders: dict[str, DataLoader[Any]] = {}
    for loader_key in ("train", "valid"):
        training = loader_key == "train"
        images = CIFAR10(root, train=training, download=True, transform=transform)
        count = len(images) if limit is None else min(limit, len(images))
        loaders[loader_key] = DataLoader(Subset(images, range(count)), batch_size=batch_size, shuffle=training)
    return loaders
