# Written by scripts/public_names.py from the __all__ of each file: run `make format`.
from runnerkit.contrib.datasets import CIFAR10 as CIFAR10
from runnerkit.contrib.datasets import CIFAR100 as CIFAR100
from runnerkit.contrib.datasets import MNIST as MNIST
from runnerkit.contrib.datasets import Digits as Digits
from runnerkit.contrib.datasets import FashionMNIST as FashionMNIST
from runnerkit.contrib.layers import ResidualBlock as ResidualBlock
from runnerkit.contrib.lookahead import Lookahead as Lookahead
from runnerkit.contrib.transforms import Compose as Compose
from runnerkit.contrib.transforms import ImageToTensor as ImageToTensor
from runnerkit.contrib.transforms import NormalizeImage as NormalizeImage
from runnerkit.contrib.transforms import ToTensor as ToTensor

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
