"""Three versions of ResNet-9 on CIFAR-10: each script runs, learns, and writes logs and checkpoints."""

import functools

import pytest

from runnerkit import read_metrics
from tests.cifar10_layout import write_cifar10
from tests.examples.start import TORCHRUN, start

NUM_TRAIN, NUM_TEST = 400, 100
NAMES = ["one_call", "own_sampler", "whole_runner"]
FILES = {
    "csv/train.csv", "csv/valid.csv", "checkpoints/last.pth", "checkpoints/best.pth", "checkpoints/index.json",
    "hparams.yml", "environment.json", "status.json",
}  # fmt: skip


def run_example(launcher, name, folder, *options, num_train, num_test):
    """Run a script on small CIFAR-10 files, narrow and on CPUs; return its logdir and the files in it."""
    write_cifar10(folder / "data", num_train=num_train, num_test=num_test)
    where = "--root data --logdir logdir --cpu --width 8 --batch-size 20"
    start(f"{launcher} examples/resnet9_cifar10/{name}.py {where}", folder, *options)
    logdir = folder / "logdir"
    return logdir, {path.relative_to(logdir).as_posix() for path in logdir.rglob("*") if path.is_file()}


def metrics_of(logdir, loader, *, epoch):
    """Return one epoch's metrics by name."""
    table = read_metrics(logdir)
    table = table[(table["loader"] == loader) & (table["epoch"] == epoch)]
    return dict(zip(table["metric"], table["value"], strict=True))


def run_again(name, folder, *options):
    """Run an example again with plain python; return its logdir and the files in it."""
    return run_example("python", name, folder, *options, num_train=NUM_TRAIN, num_test=NUM_TEST)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a function that trains an example for three epochs and returns its folder, logdir and files."""

    @functools.cache
    def train(name):
        folder = tmp_path_factory.mktemp(name)
        return folder, *run_again(name, folder, "--epochs", 3)

    return train


@pytest.mark.parametrize("name", NAMES)
def test_each_way_learns_and_leaves_logs_and_checkpoints(trained, name):
    """With plain python, accuracy on unseen images is well above chance (0.1), and each loader has its files."""
    _, logdir, left = trained(name)

    valid = metrics_of(logdir, "valid", epoch=3)
    assert left >= FILES
    assert all(any(file.startswith(f"tensorboard/{key}/events") for file in left) for key in ("train", "valid"))
    assert valid["accuracy"] > 0.3
    assert valid["accuracy"] <= valid["accuracy03"] <= valid["accuracy05"] <= 1


@pytest.mark.parametrize("name", NAMES)
def test_each_way_runs_under_torchrun_and_writes_once(tmp_path, name):
    """Two processes write one row per epoch and loader; the last of 81 images is a step after two of 2 x 20."""
    options = ("--epochs", 1, *(["--ddp"] if name == "one_call" else []))

    logdir, left = run_example(TORCHRUN, name, tmp_path, *options, num_train=81, num_test=21)

    table = read_metrics(logdir)
    assert left >= FILES
    assert len([file for file in left if file.startswith("tensorboard/")]) == 3  # two loaders, and the hyperparameters
    assert not table.duplicated(["loader", "epoch", "metric"]).any()
    assert (table["step"] == 3).all()


def test_one_call_started_again_goes_on(trained):
    """The second run trains the remaining epochs into the same logs."""
    folder, _, _ = trained("one_call")

    logdir, _ = run_again("one_call", folder, "--epochs", 4)

    table = read_metrics(logdir)
    assert table[(table["loader"] == "train") & (table["metric"] == "loss")]["epoch"].tolist() == [1, 2, 3, 4]


def test_whole_runner_goes_on_from_a_logdir(trained):
    """Finished epochs are not trained again, and their logs stay unchanged."""
    folder, logdir, before = trained("whole_runner")
    table = read_metrics(logdir)

    _, after = run_again("whole_runner", folder, "--epochs", 3, "--resume", logdir)

    # TensorBoard's HPARAMS tab gets another file, whose name contains the time.
    assert [file for file in after ^ before if not file.endswith(".hparams")] == []
    assert len(after) == len(before)
    assert read_metrics(logdir).equals(table)
