"""ResNet-9 on CIFAR-10, told three times: each script runs, learns, and leaves its logs and checkpoints."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runnerkit import read_metrics
from tests.cifar10_layout import write_cifar10

ROOT = Path(__file__).parents[2]
PLAIN = ()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
FILES = {
    "csv/train.csv", "csv/valid.csv", "checkpoints/last.pth", "checkpoints/best.pth", "checkpoints/index.json",
    "hparams.yml", "environment.json",
}  # fmt: skip


def run_example(name, tmp_path, *options, num_train, num_test, launcher=PLAIN):
    """Run a script on small CIFAR-10 files, narrow and on CPUs; return its logdir and what it left there."""
    write_cifar10(tmp_path / "data", num_train=num_train, num_test=num_test)
    script = ROOT / "examples" / "resnet9_cifar10" / f"{name}.py"
    where = ("--root", tmp_path / "data", "--logdir", tmp_path / "logdir", "--cpu", "--width", 8, "--batch-size", 20)
    example = subprocess.run(
        [sys.executable, *launcher, str(script), *map(str, (*where, *options))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert example.returncode == 0, example.stderr
    logdir = tmp_path / "logdir"
    return logdir, {path.relative_to(logdir).as_posix() for path in logdir.rglob("*") if path.is_file()}


def metrics_of(logdir, loader):
    """The last epoch's, by name."""
    table = read_metrics(logdir)
    table = table[(table["loader"] == loader) & (table["epoch"] == table["epoch"].max())]
    return dict(zip(table["metric"], table["value"], strict=True))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["one_call", "own_sampler", "whole_runner"])
def test_each_way_learns_and_leaves_logs_and_checkpoints(tmp_path, name):
    """Plain python: better than chance (0.1) by a margin on images it has not seen, files for each loader."""
    logdir, left = run_example(name, tmp_path, "--epochs", 3, num_train=400, num_test=100)

    valid = metrics_of(logdir, "valid")
    assert left >= FILES
    assert all(any(file.startswith(f"tensorboard/{key}/events") for file in left) for key in ("train", "valid"))
    assert valid["accuracy"] == valid["accuracy01"] > 0.3
    assert valid["accuracy"] <= valid["accuracy03"] <= valid["accuracy05"] <= 1


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["one_call", "own_sampler", "whole_runner"])
def test_each_way_runs_under_torchrun_and_writes_once(tmp_path, name):
    """Two processes, one row for each epoch and loader; of 81 images the odd one joins the second step of 2 x 20."""
    options = ("--epochs", 1, *(["--ddp"] if name == "one_call" else []))

    logdir, left = run_example(name, tmp_path, *options, num_train=81, num_test=21, launcher=TORCHRUN)

    table = read_metrics(logdir)
    assert left >= FILES
    assert len([file for file in left if file.startswith("tensorboard/")]) == 3  # two loaders, and the hyperparameters
    assert not table.duplicated(["loader", "epoch", "metric"]).any()
    assert (table["step"] == (3 if name == "own_sampler" else 2)).all()  # torch's sampler repeats an image instead


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_one_call_started_again_goes_on(tmp_path):
    """The second start trains the epochs that are left, in the same logs."""
    run_example("one_call", tmp_path, "--epochs", 1, num_train=40, num_test=20)

    logdir, _ = run_example("one_call", tmp_path, "--epochs", 2, num_train=40, num_test=20)

    table = read_metrics(logdir)
    assert table[(table["loader"] == "train") & (table["metric"] == "loss")]["epoch"].tolist() == [1, 2]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_whole_runner_goes_on_from_a_logdir(tmp_path):
    """What is finished stays as it is: nothing is trained again."""
    logdir, before = run_example("whole_runner", tmp_path, "--epochs", 1, num_train=80, num_test=20)
    table = read_metrics(logdir)

    _, after = run_example("whole_runner", tmp_path, "--epochs", 1, "--resume", logdir, num_train=80, num_test=20)

    # The session of TensorBoard's HPARAMS tab is written anew, by a name with the time in it.
    assert [file for file in after ^ before if not file.endswith(".hparams")] == []
    assert len(after) == len(before)
    assert read_metrics(logdir).equals(table)
