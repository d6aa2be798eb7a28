"""Tests that runnerkit trains with its requirements alone, and that what its extra `all` installs can be imported."""

import importlib.metadata
import subprocess
import sys

import pytest
from packaging.requirements import Requirement

from runnerkit import dl
from tests.only_these import hide, normalized
from tests.test_release import ROOT, setup_cfg
from tests.tiny import loader, train

LOADERS = {"train": loader(16, 4), "valid": loader(8, 4)}
START = """
import sys
sys.path.insert(0, {root!r})
from tests.only_these import OnlyThese
OnlyThese({packages!r}).install()
"""
TRAIN = """

import torch
from torch.utils.data import DataLoader, TensorDataset
from runnerkit import dl

features = torch.randn(32, 4)
data = TensorDataset(features, (features[:, 0] > 0).long())
loaders = {key: DataLoader(data, batch_size=8) for key in ("train", "valid")}
model = torch.nn.Linear(4, 2)
runner = dl.SupervisedRunner().train(
    model=model,
    criterion=torch.nn.CrossEntropyLoss(),
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loaders=loaders,
    callbacks=[dl.AccuracyCallback("logits", "targets"), dl.EarlyStoppingCallback(2, monitor="valid/loss")],
    num_epochs=2,
    logdir="log",
    hparams={"lr": 0.1},
    monitor="valid/loss",
    load_best_on_end=True,
    verbose=True,
    timeit=True,
    cpu=True,
)
assert 0 < runner.epoch_metrics["valid"]["accuracy"] <= 1
assert runner.evaluate_loader(loaders["valid"])["loss"] > 0
assert sum(len(each["logits"]) for each in runner.predict_loader(loader=loaders["valid"], resume="log")) == 32
for package in ("tensorboard", "pandas", "torchmetrics", "torchvision", "matplotlib", "sklearn", "optuna"):
    try:
        __import__(package)
    except ImportError:
        continue
    raise AssertionError(package)
"""
IMPORT = """
import importlib
import torchmetrics, torchmetrics.classification, torchmetrics.regression, torchmetrics.image
import pandas, matplotlib.figure, tensorboard
from runnerkit import contrib, dl, metrics, utils
for facade in (contrib, dl, metrics, utils):
    for name in facade.__all__:
        getattr(facade, name)
try:
    import torchvision
except ImportError:
    pass
else:
    raise AssertionError("the extra installs torchvision")
"""


def modules_of(*extras):
    """Return the modules of runnerkit's requirements and of the extras, and of all that these require."""
    groups = [setup_cfg()["options"]["install_requires"]]
    groups += [setup_cfg()["options.extras_require"][each] for each in extras]
    left = [Requirement(line) for line in "\n".join(groups).splitlines() if line and not line.startswith("#")]
    seen = set()
    while left:
        wanted = left.pop()
        key = normalized(wanted.name), frozenset(wanted.extras)
        try:
            inner = importlib.metadata.requires(wanted.name) or [] if key not in seen else []
        except importlib.metadata.PackageNotFoundError:  # of another platform, or the extra is not installed
            inner = []
        seen.add(key)
        left += [each for each in map(Requirement, inner) if applies(each, wanted.extras)]
    names = {name for name, _ in seen}
    of = importlib.metadata.packages_distributions()
    return {module for module, owners in of.items() if names & {normalized(each) for each in owners}}


def applies(requirement, extras):
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": each}) for each in ("", *extras))


def run_with(modules, code, folder):
    """Run code in a new process that can import only these modules; return what it wrote to standard error."""
    start = START.format(root=str(ROOT), packages=sorted(modules))
    done = subprocess.run([sys.executable, "-c", start + code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.cold
def test_the_core_alone_trains_with_a_logdir(tmp_path):
    """Without any extra, a run logs, saves, resumes and predicts; one warning says that TensorBoard is left out."""
    modules = modules_of()
    assert not {"tensorboard", "pandas", "torchmetrics", "torchvision", "matplotlib", "sklearn"} & modules

    stderr = run_with(modules, TRAIN, tmp_path)

    assert stderr.count("pip install runnerkit[tensorboard]") == 1
    assert (tmp_path / "log" / "csv" / "valid.csv").is_file()
    assert (tmp_path / "log" / "checkpoints" / "best.pth").is_file()
    assert not (tmp_path / "log" / "tensorboard").exists()


@pytest.mark.slow
@pytest.mark.cold
def test_what_the_extra_all_installs_can_be_imported_together(tmp_path):
    """PyPI's torchvision for CUDA breaks torchmetrics beside a torch for the CPU, so `all` does not install it."""
    modules = modules_of("all")
    assert "torchmetrics" in modules and "torchvision" not in modules

    run_with(modules, IMPORT, tmp_path)


@pytest.fixture
def without_tensorboard(monkeypatch):
    """Hide the package in this process."""
    for name in [each for each in sys.modules if each.split(".")[0] == "tensorboard" or "event_files" in each]:
        monkeypatch.delitem(sys.modules, name)
    hide(monkeypatch, "tensorboard")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_the_default_tensorboard_logger_is_left_out_with_one_warning(
    tmp_path, without_tensorboard, caplog, num_processes
):
    """The run has its other logs, and the warning says what to install."""
    train(logdir=tmp_path / "log", loaders=LOADERS, num_epochs=2, num_processes=num_processes)

    warnings = [each.getMessage() for each in caplog.records if "TensorBoard" in each.getMessage()]
    assert len(warnings) == 1 and "pip install runnerkit[tensorboard]" in warnings[0]
    assert {each.name for each in (tmp_path / "log" / "csv").iterdir()} == {"train.csv", "valid.csv"}
    assert not (tmp_path / "log" / "tensorboard").exists()


def test_no_warning_without_a_logdir_or_if_it_is_turned_off(tmp_path, without_tensorboard, caplog):
    """Runs that would not log to TensorBoard anyway do not mention it."""
    train()
    train(logdir=tmp_path / "log", loggers={"tensorboard": None})

    assert [each for each in caplog.messages if "TensorBoard" in each] == []


@pytest.mark.parametrize("key", ["tensorboard", "mine"])
def test_a_tensorboard_logger_that_is_passed_raises_before_training(tmp_path, without_tensorboard, key):
    """A logger that was asked for is not left out silently."""
    logger = dl.TensorboardLogger(tmp_path / "mine")

    with pytest.raises(ImportError, match=r"TensorboardLogger needs TensorBoard: pip install runnerkit\[tensorboard\]"):
        train(logdir=tmp_path / "log", loggers={key: logger})

    assert not list(tmp_path.rglob("*.pth"))
