"""Case b with torchvision's transforms, in raw PyTorch (argument "raw") or in runnerkit (argument "ours")."""

import sys

from benchmarks.cnn import ours, raw, work
from runnerkit.torchvision_cpu import import_torchvision

transforms = import_torchvision().transforms


def published(images: dict[str, work.Images]) -> dict[str, work.Images]:
    """Set the transforms as in torchvision's guides."""
    as_floats = [transforms.ToTensor(), transforms.Normalize([work.MEAN], [work.STD])]
    size = images["train"].pixels.shape[1]
    augment = [transforms.RandomCrop(size, padding=work.PADDING), transforms.RandomHorizontalFlip()]
    images["train"].transform = transforms.Compose([*augment, *as_floats])
    images["valid"].transform = transforms.Compose(as_floats)
    return images


if __name__ == "__main__":
    train = {"raw": raw.train, "ours": ours.train}[sys.argv.pop(1)]
    work.main(lambda images: train(published(images)))
