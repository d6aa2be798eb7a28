"""Data sets: read as torchvision reads them, downloaded completely or not at all, tested without a network."""

import gzip
import hashlib
import logging
import pickle
import runpy
import shutil
import socket
import struct
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader

from runnerkit.contrib import CIFAR10, CIFAR100, MNIST, Compose, Digits, FashionMNIST, ImageToTensor, NormalizeImage
from runnerkit.contrib.datasets import images as module_under_test
from runnerkit.contrib.datasets.images import real_images
from runnerkit.torchvision_cpu import import_torchvision
from tests.cifar10_layout import write_cifar10

published = import_torchvision().datasets
EXAMPLE = Path(__file__).parents[2] / "examples" / "resnet9_cifar10" / "data.py"
SIZES = {"train": 6, "t10k": 4}


@pytest.fixture(autouse=True)
def debian(tmp_path, monkeypatch):
    """Replace Debian's folder by an empty temporary one, so that tests do not depend on the machine."""
    folder = tmp_path / "debian"
    monkeypatch.setattr(module_under_test, "DEBIAN_FASHION_MNIST", folder)
    return folder


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serve a folder on the loopback interface in place of every mirror of the idx data sets; yield the folder."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    folder = tmp_path / "served"
    folder.mkdir()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=folder)) as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        for dataset in (published.MNIST, published.FashionMNIST):
            monkeypatch.setattr(dataset, "mirrors", [f"http://127.0.0.1:{served.server_port}/"])
        yield folder
        served.shutdown()
        thread.join()


def write_idx(folder, *, seed=0, zipped=False):
    """Write the four files of MNIST's format: 6 training and 4 test images of 28 x 28."""
    rng = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in SIZES.items():
        images = struct.pack(">4i", 0x803, count, 28, 28) + rng.bytes(count * 28 * 28)
        labels = struct.pack(">2i", 0x801, count) + bytes(rng.integers(0, 10, count, dtype=np.uint8))
        for name, content in [(f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)]:
            if zipped:
                (folder / f"{name}.gz").write_bytes(gzip.compress(content, compresslevel=1))
            else:
                (folder / name).write_bytes(content)


def write_cifar100(root):
    """Write CIFAR-100's three files: 6 training and 4 test images."""
    rng = np.random.default_rng(0)
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for name, count in [("train", 6), ("test", 4)]:
        batch = {
            "data": rng.integers(0, 256, (count, 3072), dtype=np.uint8),
            "fine_labels": rng.integers(0, 100, count).tolist(),
            "coarse_labels": rng.integers(0, 20, count).tolist(),
        }
        (folder / name).write_bytes(pickle.dumps(batch))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [str(label) for label in range(100)]}))


def publish(monkeypatch, dataset, folder):
    """Make torchvision treat the files in `folder` as the published ones."""

    def checksum(name):
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    if issubclass(dataset, published.CIFAR10):
        for attribute in ("train_list", "test_list"):
            names = [name for name, _ in getattr(dataset, attribute)]
            monkeypatch.setattr(dataset, attribute, [[name, checksum(name)] for name in names])
        monkeypatch.setattr(dataset, "meta", {**dataset.meta, "md5": checksum(dataset.meta["filename"])})
    else:
        monkeypatch.setattr(dataset, "resources", [(name, checksum(name)) for name, _ in dataset.resources])


def files_under(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("dataset", [MNIST, FashionMNIST])
@pytest.mark.parametrize("train", [True, False], ids=["train", "test"])
def test_idx_files_are_read_as_torchvision_reads_them(tmp_path, dataset, train):
    """Pixels and targets are equal and in order, with the documented dtypes."""
    name = dataset.__name__
    write_idx(tmp_path / name / "raw")
    reference = getattr(published, name)(tmp_path, train=train)

    ours = dataset(tmp_path, train=train)

    assert len(ours) == SIZES["train" if train else "t10k"]
    assert torch.equal(ours.images, reference.data)
    assert torch.equal(ours.targets, reference.targets)
    assert (ours.images.dtype, ours.targets.dtype) == (torch.uint8, torch.int64)


@pytest.mark.parametrize("train", [True, False], ids=["train", "test"])
@pytest.mark.parametrize("name", ["CIFAR10", "CIFAR100"])
def test_cifar_files_are_read_as_torchvision_reads_them(tmp_path, monkeypatch, caplog, name, train):
    """Pixels are equal, in (H, W, C) order; CIFAR-100 uses its fine labels; published files cause no warning."""
    write_cifar10(tmp_path, num_train=12, num_test=4)
    write_cifar100(tmp_path)
    publish(monkeypatch, getattr(published, name), tmp_path / getattr(published, name).base_folder)
    reference = getattr(published, name)(tmp_path, train=train)

    ours = getattr(module_under_test, name)(tmp_path, train=train)

    assert np.array_equal(ours.images.numpy(), reference.data)
    assert ours.targets.tolist() == reference.targets
    assert ours.images.is_contiguous()
    assert (ours.images.dtype, ours.targets.dtype) == (torch.uint8, torch.int64)
    assert caplog.records == []


def test_cifar_files_that_are_not_the_published_ones_are_read_with_a_warning(tmp_path, caplog):
    """The warning names the files; torchvision refuses them."""
    folder = write_cifar10(tmp_path, num_train=10, num_test=4)

    ours = CIFAR10(tmp_path, train=False)

    assert len(ours) == 4
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"{folder}: these files differ from the published CIFAR10: data_batch_1," in caplog.text


def test_an_item_is_an_array_and_an_int(tmp_path):
    """Images are NumPy uint8 arrays of shape (H, W) or (H, W, 3), also of a copy sent to another process."""
    write_cifar10(tmp_path, num_train=10, num_test=4)
    plain = pickle.loads(pickle.dumps(CIFAR10(tmp_path, train=False)))
    shapes = CIFAR10(tmp_path, train=False, transform=lambda image: (type(image), image.dtype, image.shape))

    image, target = plain[1]

    assert np.array_equal(image, plain.images[1].numpy())
    assert (type(target), target) == (int, plain.targets[1].item())
    assert shapes[0][0] == (np.ndarray, np.uint8, (32, 32, 3))
    digits = Digits(train=False)
    assert digits[0][0].shape == (8, 8)
    assert sum(1 for _ in digits) == len(digits) == 360, "an index past the end raises IndexError"


def test_a_transform_that_works_in_place_does_not_reach_the_data():
    """Otherwise the next epoch would get the changed images."""

    def erase(image):
        image[:] = 0
        return image

    digits = Digits(train=False, transform=erase)
    before = digits.images.clone()

    digits[0]

    assert torch.equal(digits.images, before)


def test_loader_yields_normalized_float_batches_also_through_torchvision_transforms():
    """Our transforms and torchvision's, after ToPILImage, make the same batch."""
    torchvision_transforms = import_torchvision().transforms
    theirs = [torchvision_transforms.ToPILImage(), torchvision_transforms.ToTensor()]
    ours = Digits(transform=Compose([ImageToTensor(), NormalizeImage(0.3, 0.4)]))
    reference = Digits(transform=Compose([*theirs, torchvision_transforms.Normalize([0.3], [0.4])]))

    images, targets = next(iter(DataLoader(ours, batch_size=16)))
    expected, _ = next(iter(DataLoader(reference, batch_size=16)))

    assert (images.shape, images.dtype) == ((16, 1, 8, 8), torch.float32)
    assert (targets.shape, targets.dtype) == ((16,), torch.int64)
    torch.testing.assert_close(images, expected, rtol=1e-6, atol=1e-6)


def test_digits_are_all_of_scikit_learns_split_in_fixed_stratified_parts():
    """The parts contain each of the 1,797 images once, and the test part has 20 % of every class, up to one image."""
    sixteenths, targets = load_digits(return_X_y=True)
    expected = sorted((*row.tolist(), target) for row, target in zip(sixteenths, targets, strict=True))

    train, test, again = Digits(train=True), Digits("ignored", train=False), Digits(train=False)

    images, labels = torch.cat([train.images, test.images]).flatten(1), torch.cat([train.targets, test.targets])
    restored = (images * (16 / 255)).round()  # a sixteenth is 15.9 grey levels, so rounding back is exact
    assert sorted((*row, label) for row, label in zip(restored.tolist(), labels.tolist(), strict=True)) == expected
    assert (torch.bincount(test.targets) - torch.bincount(torch.from_numpy(targets)) / 5).abs().max() <= 1
    assert torch.equal(test.images, again.images)


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch):
    """The error contains the install command."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(ImportError, match="pip install scikit-learn"):
        Digits()


@pytest.mark.parametrize("dataset", [MNIST, FashionMNIST, CIFAR10, CIFAR100])
def test_missing_files_are_named_with_the_root_and_the_cure(tmp_path, dataset):
    """Looking for files creates none."""
    root = tmp_path / "nothing here"

    with pytest.raises(FileNotFoundError, match=r"nothing here'.*is missing; pass download=True"):
        dataset(root, download=False)

    assert not root.exists()


def test_files_of_two_data_sets_and_a_missing_one_are_refused(tmp_path):
    """Files of the other part count too, because torchvision checks them."""
    raw = tmp_path / "MNIST" / "raw"
    write_idx(raw)
    shutil.copy(*(raw / f"{part}-labels-idx1-ubyte" for part in ("t10k", "train")))
    with pytest.raises(ValueError, match="6 images and 4 targets"):
        MNIST(tmp_path)

    (raw / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="MNIST/raw/t10k-labels-idx1-ubyte is missing"):
        MNIST(tmp_path, download=False)


def test_files_of_the_debian_package_are_unpacked_into_root(tmp_path, debian):
    """This needs no download flag, torchvision finds the files, and nothing else remains."""
    write_idx(debian, zipped=True)
    write_idx(tmp_path / "plain")
    root = tmp_path / "data"

    ours = FashionMNIST(root)

    assert torch.equal(ours.images, published.FashionMNIST(root).data)
    assert files_under(root) == [f"FashionMNIST/raw/{name}" for name in files_under(tmp_path / "plain")]
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]


def test_files_in_root_come_before_those_of_the_debian_package(tmp_path, debian):
    """The user's files are neither ignored nor overwritten."""
    write_idx(debian, seed=1, zipped=True)
    write_idx(tmp_path / "FashionMNIST" / "raw", seed=2)
    reference = published.FashionMNIST(tmp_path)

    assert torch.equal(FashionMNIST(tmp_path).images, reference.data)


def test_unpacking_that_is_cut_short_leaves_no_file(tmp_path, debian):
    """Otherwise the next run would read the incomplete file."""
    write_idx(debian, zipped=True)
    torn = debian / "t10k-labels-idx1-ubyte.gz"
    torn.write_bytes(torn.read_bytes()[:-10])

    with pytest.raises(EOFError):
        FashionMNIST(tmp_path / "data")

    assert files_under(tmp_path / "data") == []


def test_a_file_that_another_process_reads_is_replaced_not_rewritten(tmp_path, debian):
    """The reader keeps the complete file that it opened."""
    write_idx(debian, zipped=True)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    labels = raw / "train-labels-idx1-ubyte"
    labels.write_bytes(b"an older one")

    with labels.open("rb") as reader:
        ours = FashionMNIST(tmp_path)
        seen = reader.read()

    assert seen == b"an older one"
    assert labels.read_bytes()[8:] == bytes(ours.targets.tolist())


def test_several_may_unpack_at_once(tmp_path, debian):
    """Ranks that unpack at the same time all read complete files."""
    write_idx(debian, zipped=True)
    root = tmp_path / "data"

    with ThreadPoolExecutor(8) as pool:
        everyones = [ours.images for ours in pool.map(FashionMNIST, [root] * 8)]

    assert all(torch.equal(images, published.FashionMNIST(root).data) for images in everyones)
    assert [path.name for path in root.iterdir()] == ["FashionMNIST"]


def test_download_brings_the_files_once(tmp_path, monkeypatch, server):
    """The second call downloads nothing, since the server's files are gone."""
    write_idx(server, zipped=True)
    publish(monkeypatch, published.MNIST, server)
    root = tmp_path / "data"

    first = MNIST(root, download=True)
    for archive in server.iterdir():
        archive.unlink()
    second = MNIST(root, download=True)

    assert torch.equal(first.images, second.images)
    assert len(files_under(root)) == 4
    assert [path.name for path in root.iterdir()] == ["MNIST"]


def test_cifar_download_brings_the_files(tmp_path, monkeypatch, server):
    """The archive is unpacked and removed."""
    folder = write_cifar10(tmp_path / "made", num_train=10, num_test=4)
    archive = shutil.make_archive(str(server / "cifar"), "gztar", folder.parent)
    publish(monkeypatch, published.CIFAR10, folder)
    monkeypatch.setattr(published.CIFAR10, "url", published.MNIST.mirrors[0] + "cifar.tar.gz")
    monkeypatch.setattr(published.CIFAR10, "tgz_md5", hashlib.md5(Path(archive).read_bytes()).hexdigest())

    ours = CIFAR10(tmp_path / "data", download=True)

    assert len(ours) == 10
    assert files_under(tmp_path / "data") == files_under(folder.parent)


def test_failed_download_names_the_root_and_leaves_no_file(tmp_path, server):
    """Files downloaded before the failure are removed too."""
    write_idx(server, zipped=True)  # their checksums are wrong

    with pytest.raises(RuntimeError, match=r"MNIST could not be downloaded into '.*data'.*other files there"):
        MNIST(tmp_path / "data", download=True)

    assert files_under(tmp_path / "data") == []


def test_silent_server_is_given_up(tmp_path, monkeypatch):
    """The server accepts the connection and never answers; torchvision alone would wait forever."""
    monkeypatch.setattr(module_under_test, "DOWNLOAD_TIMEOUT_S", 0.05)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(published.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])

        with pytest.raises(RuntimeError, match="timed out"):
            MNIST(tmp_path, download=True)

    assert socket.getdefaulttimeout() is None


def test_real_images_are_fashion_mnist_where_it_can_be_had(tmp_path, debian, caplog):
    """If FashionMNIST is available, no warning is logged."""
    write_idx(debian, zipped=True)

    images = real_images(tmp_path / "data", train=False)

    assert isinstance(images, FashionMNIST) and len(images) == SIZES["t10k"]
    assert caplog.records == []


def test_real_images_are_digits_where_nothing_can_be_had(tmp_path, server, caplog):
    """A warning gives the reason, and the transform is applied."""
    write_idx(server, zipped=True)  # their checksums are wrong

    images = real_images(tmp_path / "data", train=False, transform=ImageToTensor())

    assert isinstance(images, Digits)
    assert images[0][0].shape == (1, 8, 8)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "File not found or corrupted" in caplog.text


def test_cifar10_example_yields_normalized_batches_and_keeps_to_its_limit(tmp_path):
    """The loaders "train" and "valid" contain the first `limit` images each."""
    write_cifar10(tmp_path, num_train=50, num_test=20)
    cifar10_loaders = runpy.run_path(str(EXAMPLE))["cifar10_loaders"]

    loaders = cifar10_loaders(tmp_path, batch_size=8, limit=30)
    images, targets = next(iter(loaders["train"]))

    assert {key: len(loader.dataset) for key, loader in loaders.items()} == {"train": 30, "valid": 20}
    assert (images.shape, images.dtype, targets.dtype) == ((8, 3, 32, 32), torch.float32, torch.int64)
    assert images.min() < -1  # black, after subtracting the mean
