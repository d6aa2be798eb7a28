"""ImageNet's folders, or images made up as they are asked for; bytes until they are on the device."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from runnerkit import dl
from runnerkit.torchvision_cpu import import_torchvision

# Per channel, over ImageNet's training images; those of torchvision's recipes.
MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
FOLDERS = {"train": "train", "valid": "val"}


class MadeUpImages(Dataset[tuple[Tensor, int]]):
    """Images whose class is a pattern of 4 x 4 colours under noise; nothing is stored, so there may be millions.

    Args:
        num_images: length; image i is of class i modulo `num_classes`.
        image_size: height and width in pixels, >= 4.
        training: the two parts have the same patterns, and noise of their own.
    """

    draws_nothing = True  # from the global generators: each image has one of its own

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
        place = torch.arange(self.image_size) * 4 // self.image_size  # which of the 4 colours a pixel has
        generator = torch.Generator().manual_seed(2 * index + self.training)
        noise = torch.randint(128, (3, self.image_size, self.image_size), generator=generator, dtype=torch.uint8)
        return self.patterns[target][:, place][:, :, place] + noise, target


def image_folder(root: Path, *, image_size: int, training: bool) -> Any:
    """Read ``root/CLASS/*``: random parts of images, half of them mirrored; in evaluation the middle."""
    vision = import_torchvision()
    steps = (
        [vision.transforms.RandomResizedCrop(image_size), vision.transforms.RandomHorizontalFlip()]
        if training
        else [vision.transforms.Resize(image_size * 8 // 7), vision.transforms.CenterCrop(image_size)]
    )
    # Bytes: a quarter of what floats are, on their way from the workers and to the device.
    return vision.datasets.ImageFolder(root, vision.transforms.Compose([*steps, vision.transforms.PILToTensor()]))


def image_loaders(
    root: Path | None, *, num_made_up: int, num_classes: int, image_size: int, batch_size: int, num_workers: int
) -> dict[str, dl.BatchPrefetchLoaderWrapper]:
    """Load what is in `root`, or make images up.

    Args:
        root: holds ``train`` and ``val``, with a folder for each class in both; None makes images up.
        num_made_up, num_classes: images to train on, and a quarter as many to evaluate; used without `root` only.
        image_size: height and width in pixels.
        batch_size: images of one process in a batch.
        num_workers: processes that fetch, beside each that trains.
    Returns:
        "train" (shuffled) and "valid", yielding (N, 3, H, W) uint8 and (N,) int64; the next batch is copied to the GPU
        on a stream of its own while the present one is computed on.
    Raises:
        FileNotFoundError: a folder is not there, or a class has no image.
        ValueError: the two parts have not the same classes.
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
        raise ValueError(f"train and val must have the same classes, and {odd} are in one of them only")
    return {
        key: dl.BatchPrefetchLoaderWrapper(_loader(each, key, batch_size, num_workers)) for key, each in data.items()
    }


def _loader(data: Any, key: str, batch_size: int, num_workers: int) -> DataLoader[Any]:
    # Workers that outlive an epoch: starting them is what makes an epoch's first batch slow.
    workers: dict[str, Any] = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    return DataLoader(data, batch_size, shuffle=key == "train", **workers)


def with_normalization(model: nn.Module) -> nn.Sequential:
    """Let `model` take bytes: they are scaled and normalized once, on the device."""
    return nn.Sequential(dl.BatchNormalize(MEAN, STD), model)
