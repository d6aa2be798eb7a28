"""CIFAR-10 or Fashion-MNIST in memory, as bytes, and augmentation of whole batches on the device."""

from pathlib import Path

from torch import Tensor, nn
from torch.nn import functional as F

from runnerkit import dl
from runnerkit.contrib import CIFAR10, FashionMNIST

DATASETS: dict[str, type[CIFAR10 | FashionMNIST]] = {"cifar10": CIFAR10, "fashion-mnist": FashionMNIST}
# Means and deviations per channel over the training images; for Fashion-MNIST before padding.
STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "fashion-mnist": ((0.2860,) * 3, (0.3530,) * 3),
}


def image_loaders(root: str | Path, *, batch_size: int, dataset: str = "cifar10") -> dict[str, dl.TensorLoader]:
    """Load a data set from `root`.

    Args:
        root: folder that contains ``cifar-10-batches-py`` or ``FashionMNIST``.
        batch_size: images per batch and process.
        dataset: a key of `DATASETS`.
    Returns:
        "train" (shuffled) and "valid" (the test part), yielding (N, 3, 32, 32) uint8 and (N,) int64.
    Raises:
        FileNotFoundError: the files are not in `root`.
    """
    loaders = {}
    for loader_key in ("train", "valid"):
        training = loader_key == "train"
        data = DATASETS[dataset](root, train=training)
        images = for_cifar_stem(data.images)
        loaders[loader_key] = dl.TensorLoader(images, data.targets, batch_size=batch_size, shuffle=training)
    return loaders


def for_cifar_stem(images: Tensor) -> Tensor:
    """Turn (N, 32, 32, 3), or grey (N, 28, 28) with 2 black pixels of padding, into (N, 3, 32, 32)."""
    if images.ndim == 4:
        return images.permute(0, 3, 1, 2).contiguous()
    return F.pad(images, [2] * 4).unsqueeze(1).expand(-1, 3, -1, -1)  # a view: three equal channels share memory


def augmentation() -> nn.Sequential:
    """Crop 32 x 32 at random from images padded with 4 black pixels, and flip half of them."""
    return nn.Sequential(dl.BatchRandomCrop(padding=4), dl.BatchRandomHorizontalFlip())


def with_normalization(model: nn.Module, *, dataset: str = "cifar10") -> nn.Sequential:
    """Normalize bytes before `model`, which is after the crop, so that the padding is black."""
    return nn.Sequential(dl.BatchNormalize(*STATISTICS[dataset]), model)
