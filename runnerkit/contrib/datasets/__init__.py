"""Data sets for examples and tests: small images, pairs of them for metric learning, and ratings of movies."""

from __future__ import annotations

from runnerkit.contrib.datasets.images import CIFAR10 as CIFAR10
from runnerkit.contrib.datasets.images import CIFAR100 as CIFAR100
from runnerkit.contrib.datasets.images import MNIST as MNIST
from runnerkit.contrib.datasets.images import Digits as Digits
from runnerkit.contrib.datasets.images import FashionMNIST as FashionMNIST
from runnerkit.contrib.datasets.metric_learning import MnistMLDataset as MnistMLDataset
from runnerkit.contrib.datasets.metric_learning import MnistQGDataset as MnistQGDataset
from runnerkit.contrib.datasets.movielens import MovieLens as MovieLens
