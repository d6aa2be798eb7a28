"""ImageNet's folders, or synthetic images generated on demand; both stay bytes until they are on the device."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runnerkit import dl
from runnerkit.torchvision_cpu import import_torchvision

# Per channel over ImageNet's training images, as in torchvision's recipes.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
FOLDERS = {"train": "train", "valid": "val"}


class MadeUpImages(Dataset[tuple[Tensor, int]]):
    """Noisy images whose class is a pattern of 4 x 4 colors; none are stored, so there can be millions.

    Args:
        num_images: length; image i has class i modulo `num_classes`.
        image_size: height and width in pixels, >= 4.
        training: selects the noise; the training and validation parts have the same patterns.
    """

    draws_nothing = True  # from global generators: each image has its own generator

    def __init__(self, num_images: int, *, num_classes: int, image_size: int, training: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.patterns = torch.randint(128, (num_classes, 3, 4, 4), generator=generator, dtype=torch.uint8)
        self.classes = [str(number) for number in range(num_classes)]
        self.num_images = num_images
        self.image_size = image_size
        self.training = training

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """Return (3, H, W) uint8 and the class."""
        target = index % len(self.classes)
        place = torch.arange(self.image_size) * 4 // self.image_size  # index of a pixel's color
        generator = torch.Generator().manual_seed(2 * index + self.training)
        noise = torch.randint(128, (3, self.image_size, self.image_size), generator=generator, dtype=torch.uint8)
        return self.patterns[target][:, place][:, :, place] + noise, target


def image_folder(root: Path, *, image_size: int, training: bool) -> Any:
    """Read ``root/CLASS/*``: random crops, half of them flipped, for training, and center crops for evaluation."""
    vision = import_torchvision()
    steps = (
        [vision.transforms.RandomResizedCrop(image_size), vision.transforms.RandomHorizontalFlip()]
        if training
        else [vision.transforms.Resize(image_size * 8 // 7), vision.transforms.CenterCrop(image_size)]
    )
    # Bytes are a quarter of the size of floats in transfers from the workers and to the device.
    return vision.datasets.ImageFolder(root, vision.transforms.Compose([*steps, vision.transforms.PILToTensor()]))


def image_loaders(
    root: Path | None, *, num_made_up: int, num_classes: int, image_size: int, batch_size: int, num_workers: int
) -> dict[str, dl.BatchPrefetchLoaderWrapper]:
    """Load the images in `root`, or generate synthetic ones.

    Args:
        root: contains ``train`` and ``val``, each with a folder per class; None generates images.
        num_made_up, num_classes: training images (a quarter as many for validation) and classes; only without `root`.
        image_size: height and width in pixels.
        batch_size: images per batch and process.
        num_workers: worker processes per training process.
    Returns:
        "train" (shuffled) and "valid", yielding (N, 3, H, W) uint8 and (N,) int64; the next batch is copied to the GPU
        on a separate stream while the current one is processed.
    Raises:
        FileNotFoundError: a folder is missing, or a class is empty.
        ValueError: the two parts have different classes.
    """
    data: dict[str, Any] = {}
    for key, folder in FOLDERS.items():
        training = key == "train"
        if root is not None:
            data[key] = image_folder(root / folder, image_size=image_size, training=training)
        else:
            count = num_made_up if training else num_made_up // 4
            data[key] = MadeUpImages(count, num_classes=num_classes, image_size=image_size, training=training)
    if data["train"].classes != data["valid"].classes:
        odd = sorted(set(data["train"].classes) ^ set(data["valid"].classes))
        raise ValueError(f"train and val must have the same classes, but {odd} are only in one of them")
    return {
        key: dl.BatchPrefetchLoaderWrapper(_loader(each, key, batch_size, num_workers)) for key, each in data.items()
    }


def _loader(data: Any, key: str, batch_size: int, num_workers: int) -> DataLoader[Any]:
    # Workers persist between epochs, because starting them delays an epoch's first batch.
    workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return DataLoader(data, batch_size, shuffle=key == "train", **workers)


def with_normalization(model: nn.Module) -> nn.Sequential:
    """Scale and normalize bytes before `model`, once, on the device."""
    return nn.Sequential(dl.BatchNormalize(MEAN, STD), model)
