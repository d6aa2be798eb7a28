"""The demo: one command from images to learning curves."""

import shlex
import struct
from pathlib import Path

import pytest

from runnerkit import read_metrics
from runnerkit.contrib import Digits
from runnerkit.contrib.datasets.images import DEBIAN_FASHION_MNIST
from tests.examples.start import ROOT, TORCHRUN, start

FASHION_MNIST_ROOT = ROOT / "data"
HAS_FASHION_MNIST = DEBIAN_FASHION_MNIST.is_dir() or (FASHION_MNIST_ROOT / "FashionMNIST" / "raw").is_dir()


def write_digits_as_fashion_mnist(root):
    """Write scikit-learn's digits in the format and place of Fashion-MNIST's files."""
    folder = root / "FashionMNIST" / "raw"
    folder.mkdir(parents=True)
    for name, train in (("train", True), ("t10k", False)):
        digits = Digits(train=train)
        images, targets = digits.images, digits.targets.byte()
        header = struct.pack(">4i", 0x803, *images.shape)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(header + images.numpy().tobytes())
        header = struct.pack(">2i", 0x801, len(targets))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(header + targets.numpy().tobytes())


def valid_accuracy(logdir):
    """Return the logged validation accuracy by epoch."""
    table = read_metrics(logdir)
    return table[(table["loader"] == "valid") & (table["metric"] == "accuracy")]["value"].tolist()


@pytest.mark.slow
def test_demo_learns_and_leaves_everything_it_speaks_of(tmp_path):
    """Logs, curves and checkpoints exist and are listed, and the last line is the command that displays them."""
    write_digits_as_fashion_mnist(tmp_path / "data")
    logdir = tmp_path / "logdir"

    output = start("python examples/demo.py --data-root data --batch-size 16 --logdir", tmp_path, logdir)

    left = {path.relative_to(logdir).as_posix() for path in logdir.rglob("*") if path.is_file()}
    assert left >= {
        "csv/train.csv", "csv/valid.csv", "checkpoints/last.pth", "checkpoints/best.pth", "checkpoints/index.json",
        "hparams.yml", "environment.json", "metrics.png",
    }  # fmt: skip
    assert all(any(name.startswith(f"tensorboard/{key}/events") for name in left) for key in ("train", "valid"))
    assert all(str(logdir / name) in output for name in left)
    assert all(name in output for name in ("accuracy", "accuracy03", "accuracy05"))
    assert valid_accuracy(logdir)[-1] > 0.7  # ten classes: chance is 0.1
    command, *arguments = shlex.split(output.splitlines()[-1])
    assert Path(command).name == "tensorboard" and Path(command).is_file()
    assert arguments == ["--logdir", str(logdir)]


@pytest.mark.slow
def test_demo_runs_under_torchrun_and_writes_once(tmp_path):
    """Two processes started by a launcher write one set of files and one report."""
    write_digits_as_fashion_mnist(tmp_path / "data")
    options = "--data-root data --logdir logdir --limit 64 --epochs 1"

    output = start(f"{TORCHRUN} examples/demo.py {options}", tmp_path)

    assert len(valid_accuracy(tmp_path / "logdir")) == 1
    assert len(list((tmp_path / "logdir").rglob("events*"))) == 3  # two loaders and the hyperparameters
    assert output.count("tensorboard --logdir") == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not HAS_FASHION_MNIST,
    reason="no Fashion-MNIST on this machine and tests use no network: apt-get install dataset-fashion-mnist",
)
def test_demo_is_right_for_nine_in_ten_clothes(tmp_path):
    """As in the README: Fashion-MNIST, 3 epochs, ddp=True, amp=True, seed 42, at least 90 % of the test images."""
    root = tmp_path / "data" if DEBIAN_FASHION_MNIST.is_dir() else FASHION_MNIST_ROOT

    start("python examples/demo.py --logdir logdir --data-root", tmp_path, root, timeout_s=1100)

    assert len(valid_accuracy(tmp_path / "logdir")) == 3
    assert valid_accuracy(tmp_path / "logdir")[-1] >= 0.9
