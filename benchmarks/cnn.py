"""Case b: a small CNN on Fashion-MNIST, or on scikit-learn's digits: one epoch, from files to metrics."""

import argparse
import importlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.contrib import Digits, FashionMNIST
from runnerkit.contrib.datasets import ImageDataset
from runnerkit.torchvision_cpu import import_torchvision

import_torchvision()
transforms: Any = importlib.import_module("torchvision.transforms")

BATCH_SIZE, PADDING = 256, 2
MEAN, STD = 0.286, 0.353


def images(*, train: bool, transform: Any = None) -> ImageDataset:
    try:
        return FashionMNIST(Path("data"), train=train, transform=transform)
    except (FileNotFoundError, ImportError):
        return Digits(train=train, transform=transform)


def loaders() -> dict[str, DataLoader[Any]]:
    """Per-sample transforms, as everybody writes them."""
    size = images(train=False).images.shape[1]
    as_floats = [transforms.ToTensor(), transforms.Normalize([MEAN], [STD])]
    augmented = [transforms.RandomCrop(size, padding=PADDING), transforms.RandomHorizontalFlip()]
    to_pil = transforms.ToPILImage()
    train = images(train=True, transform=transforms.Compose([to_pil, *augmented, *as_floats]))
    valid = images(train=False, transform=transforms.Compose([to_pil, *as_floats]))
    return {
        "train": DataLoader(train, batch_size=BATCH_SIZE, shuffle=True),
        "valid": DataLoader(valid, batch_size=BATCH_SIZE),
    }


def make_model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 8, kernel_size=3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.LazyLinear(10)),
    )


def initialized(model: nn.Module, image_size: int) -> nn.Module:
    """Give the lazy layer its size."""
    with torch.no_grad():
        model.eval()(torch.zeros(1, 1, image_size, image_size))
    return model.train()


def raw() -> dict[str, float]:
    both = loaders()
    model = initialized(make_model(), both["train"].dataset.images.shape[1])  # type: ignore[attr-defined]
    optimizer, criterion = torch.optim.AdamW(model.parameters(), lr=3e-3), nn.CrossEntropyLoss()
    metrics = {}
    for key, loader in both.items():
        model.train(key == "train")
        loss_sum, hits, num_samples = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.int64), 0
        with torch.set_grad_enabled(key == "train"):
            for features, targets in loader:
                logits = model(features)
                loss = criterion(logits, targets)
                if key == "train":
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                loss_sum += loss.detach() * len(targets)
                hits += (logits.argmax(dim=1) == targets).sum()
                num_samples += len(targets)
        metrics[key] = {"loss": loss_sum.item() / num_samples, "accuracy": hits.item() / num_samples}
    return metrics["train"]


def ours(*, in_memory: bool) -> dict[str, float]:
    both: dict[str, Any]
    callbacks: list[dl.Callback] = [dl.AccuracyCallback("logits", "targets")]
    if in_memory:
        data = {key: images(train=key == "train") for key in ("train", "valid")}
        image_size = data["train"].images.shape[1]
        both = {
            key: dl.TensorLoader(each.images.unsqueeze(1), each.targets, batch_size=BATCH_SIZE, shuffle=key == "train")
            for key, each in data.items()
        }
        augment = nn.Sequential(
            dl.BatchRandomCrop(padding=PADDING), dl.BatchRandomHorizontalFlip(), dl.BatchNormalize([MEAN], [STD])
        )
        callbacks.append(dl.BatchTransformCallback(augment, input_key="features"))
    else:
        both = loaders()
        image_size = both["train"].dataset.images.shape[1]
    model = initialized(make_model(), image_size)
    runner = dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
        loaders=both,
        callbacks=callbacks,
        loggers={"console": None},
        cpu=True,
    )
    return runner.epoch_metrics["train"]


def main() -> None:
    """Train by hand, by runnerkit with the same loaders, or with its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("who", choices=("raw", "same-loader", "tensor-loader"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    begin = time.perf_counter()
    metrics = raw() if options.who == "raw" else ours(in_memory=options.who == "tensor-loader")
    seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "same": {"loss": metrics["loss"], "accuracy": metrics["accuracy"]}}))


if __name__ == "__main__":
    main()
