"""Small image data sets in memory: MNIST, Fashion-MNIST, CIFAR, and digits that do not need a download."""

from __future__ import annotations

import gzip
import importlib
import logging
import os
import shutil
import socket
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runnerkit.contrib.transforms import Compose, ImageToTensor, NormalizeImage
from runnerkit.torchvision_cpu import import_torchvision

__all__ = ["CIFAR10", "CIFAR100", "Digits", "FashionMNIST", "MNIST"]

Transform: TypeAlias = Callable[[Any], Any]
logger = logging.getLogger(__name__)

DIGITS = (0.1307, 0.3081)  # mean and standard deviation of MNIST's training pixels, in [0, 1]
DOWNLOAD_TIMEOUT_S = 10.0  # without data, not in total: slow servers are fine, unresponsive ones are not
# Debian's package dataset-fashion-mnist installs the four published files here, gzipped.
DEBIAN_FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


class ImageDataset(Dataset[tuple[Any, int]], ABC):
    """A data set of images with one class each, read once and kept in memory.

    Args:
        root: parent of the data set's folder, as in torchvision.
        train: use the training part, else the test part.
        download: download files that are missing in `root`. Concurrent processes each download a copy and never
            see incomplete files; to download once, call this before the processes start.
        transform: converts a NumPy array, uint8, (H, W) or (H, W, 3), to the model's input. Put `ToPILImage()` before
            torchvision transforms that expect a PIL image.
    Attributes:
        images: (N, H, W) or (N, H, W, 3) uint8.
        targets: (N,) int64.
    Raises:
        FileNotFoundError: files are missing and `download` is off.
        RuntimeError: the download failed.
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        download: bool = False,
        transform: Transform | None = None,
    ) -> None:
        self.transform = transform
        self.images, self.targets = self._read(Path(root).expanduser(), train=train, download=download)
        if len(self.images) != len(self.targets):
            raise ValueError(f"{root} has {len(self.images)} images and {len(self.targets)} targets: download it again")

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        image = self.images[index].numpy().copy()  # in-place transforms must not affect the next epoch
        return (image if self.transform is None else self.transform(image)), int(self.targets[index])

    @abstractmethod
    def _read(self, root: Path, *, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        """Return `images` and `targets`."""


class MNIST(ImageDataset):
    """Handwritten digits: 60,000 training and 10,000 test images, gray, 28 x 28, in ``root/MNIST/raw``.

    Args:
        root, train, download: as in :class:`CIFAR10`; files that are missing are downloaded by default.
        transform: as there; None converts to (1, 28, 28) float32, normalized.
        normalize: (mean, std) of the pixels in [0, 1], for a `transform` of None; None leaves them in [0, 1].

    >>> MNIST("no-such-folder", train=False, download=False)
    Traceback (most recent call last):
    FileNotFoundError: no MNIST in 'no-such-folder': MNIST/raw/train-images-idx3-ubyte is missing; pass download=True
    """

    def __init__(
        self,
        root: str | Path,
        train: bool = True,
        download: bool = True,
        transform: Transform | None = None,
        normalize: tuple[float, float] | None = DIGITS,
    ) -> None:
        if transform is None:
            transform = ImageToTensor() if normalize is None else Compose([ImageToTensor(), NormalizeImage(*normalize)])
        super().__init__(root, train, download, transform)

    def _read(self, root: Path, *, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        return _read_idx("MNIST", root, train=train, download=download)


class FashionMNIST(ImageDataset):
    """Clothes: 60,000 training and 10,000 test images, gray, 28 x 28, in ``root/FashionMNIST/raw``.

    If Debian's package dataset-fashion-mnist is installed, its files are unpacked into `root`.

    >>> import struct
    >>> with tempfile.TemporaryDirectory() as root:
    ...     raw = Path(root, "FashionMNIST", "raw")
    ...     raw.mkdir(parents=True)
    ...     for part in ("train", "t10k"):
    ...         _ = Path(raw, f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, 2, 1, 1) + bytes(2))
    ...         _ = Path(raw, f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, 2) + bytes([9, 0]))
    ...     FashionMNIST(root, train=True).targets
    tensor([9, 0])
    """

    def _read(self, root: Path, *, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        return _read_idx("FashionMNIST", root, train=train, download=download, archives=DEBIAN_FASHION_MNIST)


class CIFAR10(ImageDataset):
    """Ten kinds of objects: 50,000 training and 10,000 test images, RGB, 32 x 32, in ``root/cifar-10-batches-py``.

    Other files of the same layout are read too, with a warning. They are pickles: read only files that you trust.

    >>> CIFAR10("no-such-folder", train=False)
    Traceback (most recent call last):
    FileNotFoundError: no CIFAR10 in 'no-such-folder': cifar-10-batches-py/data_batch_1 is missing; pass download=True
    """

    def _read(self, root: Path, *, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        return _read_cifar("CIFAR10", root, train=train, download=download)


class CIFAR100(ImageDataset):
    """A hundred kinds of objects, with fine labels, in ``root/cifar-100-python``; otherwise like :class:`CIFAR10`.

    >>> CIFAR100("no-such-folder", train=False)
    Traceback (most recent call last):
    FileNotFoundError: no CIFAR100 in 'no-such-folder': cifar-100-python/train is missing; pass download=True
    """

    def _read(self, root: Path, *, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        return _read_cifar("CIFAR100", root, train=train, download=download)


class Digits(ImageDataset):
    """Handwritten digits from scikit-learn: 1,437 training and 360 test images, gray, 8 x 8, in a fixed split.

    Args:
        root: ignored; accepted so that this class can replace the others.

    >>> digits = Digits(train=False)
    >>> len(digits), digits.images.shape, int(digits.images.max())
    (360, torch.Size([360, 8, 8]), 255)
    """

    def __init__(self, root: str | Path | None = None, train: bool = True, transform: Transform | None = None) -> None:
        super().__init__(root or "", train=train, transform=transform)

    def _read(self, root: Path, *, train: bool, download: bool) -> tuple[Tensor, Tensor]:
        try:
            sklearn_datasets = importlib.import_module("sklearn.datasets")
            model_selection = importlib.import_module("sklearn.model_selection")
        except ModuleNotFoundError:
            raise ImportError("Digits needs scikit-learn: pip install scikit-learn") from None
        sixteenths, targets = sklearn_datasets.load_digits(return_X_y=True)
        images = np.rint(sixteenths.reshape(-1, 8, 8) * 255 / 16).astype(np.uint8)
        split = model_selection.train_test_split(images, targets, test_size=0.2, stratify=targets, random_state=0)
        part = 0 if train else 1  # split: train images, test images, train targets, test targets
        return torch.from_numpy(split[part]), torch.from_numpy(split[2 + part]).long()


def real_images(root: str | Path, train: bool, transform: Transform | None = None) -> ImageDataset:
    """Return Fashion-MNIST if it is on this machine or can be downloaded, else :class:`Digits`, with a warning.

    With DDP call it before the processes start: otherwise the download may fail in some of them only, which then train
    on other data.
    """
    try:
        return FashionMNIST(root, train=train, download=True, transform=transform)
    except (RuntimeError, ImportError) as error:
        logger.warning("using scikit-learn's 8 x 8 digits instead of Fashion-MNIST: %s", error)
        return Digits(train=train, transform=transform)


def _read_idx(
    name: str, root: Path, *, train: bool, download: bool, archives: Path | None = None
) -> tuple[Tensor, Tensor]:
    """Read a data set in MNIST's format; `archives` is a folder that may contain its gzipped files."""
    _, published = _published(name)
    files = [f"{name}/raw/{Path(archive).stem}" for archive, _ in published.resources]
    if archives is not None and _missing(files, root):
        _unpack(archives, files, root)
    _provide(published, files, root, download=download)
    data = published(root, train=train)
    return data.data, data.targets


def _published(name: str) -> tuple[Any, Any]:
    """Return torchvision's module of data sets, and its class of this name."""
    datasets = import_torchvision().datasets
    return datasets, getattr(datasets, name)


def _read_cifar(name: str, root: Path, *, train: bool, download: bool) -> tuple[Tensor, Tensor]:
    """Read a data set in CIFAR's format, also with other checksums than published."""
    datasets, published = _published(name)
    meta = published.meta
    checksums = dict([*published.train_list, *published.test_list, (meta["filename"], meta["md5"])])
    _provide(published, [f"{published.base_folder}/{file}" for file in checksums], root, download=download)
    folder = root / published.base_folder
    changed = [file for file, md5 in checksums.items() if not datasets.utils.check_integrity(folder / file, md5)]
    if changed:
        logger.warning("%s: these files differ from the published %s: %s", folder, name, ", ".join(changed))
    unchecked = {  # None disables torchvision's check
        "train_list": [(file, None) for file, _ in published.train_list],
        "test_list": [(file, None) for file, _ in published.test_list],
        "meta": {**meta, "md5": None},
    }
    data = type(name, (published,), unchecked)(root, train=train)
    return torch.from_numpy(data.data).contiguous(), torch.tensor(data.targets, dtype=torch.int64)


def _missing(files: Sequence[str], root: Path) -> list[str]:
    return [file for file in files if not (root / file).is_file()]


def _provide(published: Any, files: Sequence[str], root: Path, *, download: bool) -> None:
    """Ensure that `root` contains `files`, which the torchvision class `published` can download."""
    name, missing = published.__name__, _missing(files, root)
    if not missing:
        return
    if not download:
        raise FileNotFoundError(f"no {name} in {str(root)!r}: {missing[0]} is missing; pass download=True")
    try:
        with _moving_into(files, root) as folder, _socket_timeout(DOWNLOAD_TIMEOUT_S):
            published(folder, download=True)
    except (OSError, RuntimeError, HTTPException) as error:
        reason = " ".join(str(error).split())  # torchvision's message has several lines
        raise RuntimeError(
            f"{name} could not be downloaded into {str(root)!r}: {reason} Without a network, copy {missing[0]} "
            "and the other files there"
        ) from error


def _unpack(archives: Path, files: Sequence[str], root: Path) -> None:
    """Gunzip `files` from the folder `archives` into `root`; do nothing if any is missing."""
    sources = {file: archives / f"{Path(file).name}.gz" for file in files}
    if not all(source.is_file() for source in sources.values()):
        return
    with _moving_into(files, root) as folder:
        for file, source in sources.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(source) as packed, (folder / file).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)


@contextmanager
def _moving_into(files: Sequence[str], root: Path) -> Iterator[Path]:
    """Yield an empty folder; if the body succeeds, move `files` from it into `root` atomically."""
    root.mkdir(parents=True, exist_ok=True)
    # One folder per process, on the file system of `root`, where os.replace is atomic.
    with tempfile.TemporaryDirectory(dir=root, prefix=".incoming-") as folder:
        yield Path(folder)
        for file in files:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(folder, file), root / file)


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set a time-out for sockets opened in the body; torchvision sets none, and a silent server would hang the run."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
