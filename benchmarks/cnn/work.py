"""The work of case b, shared by all candidates: Fashion-MNIST from files, image by image, into a small CNN.

The peers' environment has neither torchvision nor runnerkit's dependencies, so this file reads and crops the images.
"""

import argparse
import gzip
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # otherwise the first step imports it, for 2 s, unless a framework already has
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.turns import Turns

# Both parts in full: image by image, one core needs minutes for them.
NUM_TRAIN, NUM_VALID = 60_000, 10_000
BATCH_SIZE, PADDING = 256, 2
SAMPLES_A_TURN = 3000
MEAN, STD = 0.286, 0.353
PUBLISHED = Path("data/FashionMNIST/raw")
DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # from the package dataset-fashion-mnist

Metrics = dict[str, dict[str, float]]  # keys "train" and "valid", then "loss" and "accuracy"


class Images(Dataset[tuple[Tensor, int]]):
    """Grey images, (N, H, W) uint8, and classes, (N,) int64; `transform` maps a PIL image to a sample."""

    def __init__(
        self, pixels: np.ndarray, targets: np.ndarray, *, transform: Callable[[Image.Image], Tensor], turns: Turns
    ) -> None:
        self.pixels, self.targets, self.transform, self.turns = pixels, targets, transform, turns
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.num_read += 1
        if self.num_read % SAMPLES_A_TURN == 0:
            self.turns.wait()
        return self.transform(Image.fromarray(self.pixels[index])), int(self.targets[index])


def read(turns: Turns, *, num_train: int = NUM_TRAIN, num_valid: int = NUM_VALID) -> dict[str, Images]:
    """Return the first images of both parts of Fashion-MNIST, or of scikit-learn's digits if it is missing."""
    try:
        train = _idx("train-images-idx3-ubyte", 16).reshape(-1, 28, 28), _idx("train-labels-idx1-ubyte", 8)
        valid = _idx("t10k-images-idx3-ubyte", 16).reshape(-1, 28, 28), _idx("t10k-labels-idx1-ubyte", 8)
    except FileNotFoundError:
        from sklearn.datasets import load_digits  # imported only if it is used

        digits = load_digits()
        pixels = (digits.images * 255 / 16).astype(np.uint8)
        train, valid = (pixels[:1437], digits.target[:1437]), (pixels[1437:], digits.target[1437:])
    return {
        "train": Images(*(each[:num_train].copy() for each in train), transform=augmented, turns=turns),
        "valid": Images(*(each[:num_valid].copy() for each in valid), transform=as_floats, turns=turns),
    }


def _idx(name: str, header_bytes: int) -> np.ndarray:
    path = PUBLISHED / name
    content = path.read_bytes() if path.is_file() else gzip.decompress((DEBIAN / f"{name}.gz").read_bytes())
    return np.frombuffer(content, dtype=np.uint8, offset=header_bytes)


def as_floats(image: Image.Image) -> Tensor:
    """Return (1, H, W) float32, as torchvision's ToTensor and Normalize do."""
    return torch.from_numpy(np.array(image)).unsqueeze(0).to(torch.float32).div(255).sub_(MEAN).div_(STD)


def augmented(image: Image.Image) -> Tensor:
    """Apply RandomCrop and RandomHorizontalFlip with the same draws as torchvision's, then `as_floats`."""
    width, height = image.size
    top, left = (torch.randint(2 * PADDING + 1, size=(1,)).item() for _ in range(2))
    image = ImageOps.expand(image, border=PADDING).crop((left, top, left + width, top + height))
    return as_floats(ImageOps.mirror(image) if torch.rand(1) < 0.5 else image)


def loaders(images: Mapping[str, Dataset[Any]]) -> dict[str, DataLoader[Any]]:
    """Return DataLoaders that transform sample by sample, as commonly written."""
    return {key: DataLoader(each, batch_size=BATCH_SIZE, shuffle=key == "train") for key, each in images.items()}


def make_model(images: dict[str, Images]) -> nn.Sequential:
    torch.manual_seed(1)
    side = -(-images["train"].pixels.shape[1] // 4)  # two convolutions halve it, rounding up
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, kernel_size=3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(16 * side * side, 10)),
    )


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=3e-3)


class Sums:
    """Sums of a loader's loss and hits, for frameworks that leave them to the user; steps copy nothing to the host."""

    def __init__(self) -> None:
        self.loss, self.hits = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64)
        self.num_samples = 0

    def add(self, loss: Tensor, logits: Tensor, targets: Tensor) -> None:
        self.loss += loss.detach() * len(targets)
        self.hits += (logits.argmax(dim=1) == targets).sum()
        self.num_samples += len(targets)

    def means(self) -> dict[str, float]:
        return {"loss": self.loss.item() / self.num_samples, "accuracy": self.hits.item() / self.num_samples}


def main(train: Callable[[dict[str, Images]], Metrics]) -> None:
    """Read, train for an epoch and validate, then print one line of JSON; all candidates agree on `same`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--num-train", type=int, default=NUM_TRAIN)
    parser.add_argument("--num-valid", type=int, default=NUM_VALID)
    options = parser.parse_args()
    torch.set_num_threads(1)
    turns = Turns()
    turns.wait()
    begin, waited = time.perf_counter(), turns.waited
    metrics = train(read(turns, num_train=options.num_train, num_valid=options.num_valid))
    seconds = time.perf_counter() - begin - (turns.waited - waited)
    same = {f"{key} {name}": metrics[key][name] for key in ("train", "valid") for name in ("loss", "accuracy")}
    print(json.dumps({"seconds": seconds, "same": same}))
