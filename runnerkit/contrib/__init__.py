"""Data sets, transforms, layers and an optimizer that examples need; the core never imports this package."""

from __future__ import annotations

from runnerkit.contrib.datasets import CIFAR10, CIFAR100, MNIST, Digits, FashionMNIST
from runnerkit.contrib.layers import ResidualBlock
from runnerkit.contrib.lookahead import Lookahead
from runnerkit.contrib.transforms import Compose, ImageToTensor, NormalizeImage, ToTensor

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "Compose",
    "Digits",
    "FashionMNIST",
    "ImageToTensor",
    "Lookahead",
    "MNIST",
    "NormalizeImage",
    "ResidualBlock",
    "ToTensor",
]
