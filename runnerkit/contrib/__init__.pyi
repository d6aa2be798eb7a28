# Written by scripts/public_names.py from the __all__ of each file: run `make format`.
from runnerkit.contrib.datasets.images import CIFAR10 as CIFAR10
from runnerkit.contrib.datasets.images import CIFAR100 as CIFAR100
from runnerkit.contrib.datasets.images import MNIST as MNIST
from runnerkit.contrib.datasets.images import Digits as Digits
from runnerkit.contrib.datasets.images import FashionMNIST as FashionMNIST
from runnerkit.contrib.datasets.metric_learning import MnistMLDataset as MnistMLDataset
from runnerkit.contrib.datasets.metric_learning import MnistQGDataset as MnistQGDataset
from runnerkit.contrib.datasets.movielens import MovieLens as MovieLens
from runnerkit.contrib.layers import Flatten as Flatten
from runnerkit.contrib.layers import GaussianNoise as GaussianNoise
from runnerkit.contrib.layers import GeM2d as GeM2d
from runnerkit.contrib.layers import GlobalAvgPool2d as GlobalAvgPool2d
from runnerkit.contrib.layers import GlobalConcatPool2d as GlobalConcatPool2d
from runnerkit.contrib.layers import GlobalMaxPool2d as GlobalMaxPool2d
from runnerkit.contrib.layers import Lambda as Lambda
from runnerkit.contrib.layers import Normalize as Normalize
from runnerkit.contrib.layers import ResidualBlock as ResidualBlock
from runnerkit.contrib.lookahead import Lookahead as Lookahead
from runnerkit.contrib.losses import DiceLoss as DiceLoss
from runnerkit.contrib.losses import IoULoss as IoULoss
from runnerkit.contrib.losses import TripletMarginLossWithSampler as TripletMarginLossWithSampler
from runnerkit.contrib.models import MnistSimpleNet as MnistSimpleNet
from runnerkit.contrib.transforms import Compose as Compose
from runnerkit.contrib.transforms import ImageToTensor as ImageToTensor
from runnerkit.contrib.transforms import NormalizeImage as NormalizeImage
from runnerkit.contrib.transforms import ToTensor as ToTensor

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "Compose",
    "DiceLoss",
    "Digits",
    "FashionMNIST",
    "Flatten",
    "GaussianNoise",
    "GeM2d",
    "GlobalAvgPool2d",
    "GlobalConcatPool2d",
    "GlobalMaxPool2d",
    "ImageToTensor",
    "IoULoss",
    "Lambda",
    "Lookahead",
    "MNIST",
    "MnistMLDataset",
    "MnistQGDataset",
    "MnistSimpleNet",
    "MovieLens",
    "Normalize",
    "NormalizeImage",
    "ResidualBlock",
    "ToTensor",
    "TripletMarginLossWithSampler",
]
