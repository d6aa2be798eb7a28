"""CIFAR-10 in memory, as bytes; cropped, flipped and normalized in whole batches on the device."""

from pathlib import Path

from torch import nn

from runnerkit import dl
from runnerkit.contrib import CIFAR10

# Per channel, over the 50,000 training images.
MEAN = (0.4914, 0.4822, 0.4465)
STD = (0.2470, 0.2435, 0.2616)


def image_loaders(root: str | Path, *, batch_size: int) -> dict[str, dl.TensorLoader]:
    """Load CIFAR-10 from `root`.

    Args:
        root: holds ``cifar-10-batches-py``.
        batch_size: images of one process in a batch.
    Returns:
        "train" (shuffled) and "valid" (the test part), yielding (N, 3, 32, 32) uint8 and (N,) int64.
    Raises:
        FileNotFoundError: the files are not in `root`.
    """
    loaders = {}
    for loader_key in ("train", "valid"):
        training = loader_key == "train"
        data = CIFAR10(root, train=training)
        images = data.images.permute(0, 3, 1, 2).contiguous()
        loaders[loader_key] = dl.TensorLoader(images, data.targets, batch_size=batch_size, shuffle=training)
    return loaders


def augmentation() -> nn.Sequential:
    """Crop 32 x 32 at random out of the image with 4 black pixels all around, and flip every other one."""
    return nn.Sequential(dl.BatchRandomCrop(padding=4), dl.BatchRandomHorizontalFlip())


def with_normalization(model: nn.Module) -> nn.Sequential:
    """Let `model` take bytes: after the crop, so that what is padded is black."""
    return nn.Sequential(dl.BatchNormalize(MEAN, STD), model)
