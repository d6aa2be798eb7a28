"""`runnerkit.catalyst`: programs of Catalyst 21.12 run after a change of import lines, and find the files they read."""

import csv
import math
import os
import shutil
import struct
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit.catalyst import dl, metrics, utils
from runnerkit.catalyst.contrib import MNIST, NTXentLoss
from runnerkit.catalyst.registry import REGISTRY, Registry
from runnerkit.catalyst.settings import IS_CUDA_AVAILABLE, NUM_CUDA_DEVICES, SETTINGS
from tests.interrupt import Interrupt


def train(logdir, *, runner=None, more=(), **arguments):
    utils.set_global_seed(42)
    data = TensorDataset(torch.randn(24, 4), torch.randint(0, 3, (24,)))
    model = nn.Linear(4, 3)
    runner = runner or dl.SupervisedRunner()
    top = dl.AccuracyCallback(input_key="logits", target_key="targets", topk=(1, 2))
    runner.train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=torch.optim.Adam(model.parameters(), lr=0.02),
        loaders={key: DataLoader(data, batch_size=8) for key in ("train", "valid", "infer")},
        num_epochs=2,
        logdir=logdir,
        **{"callbacks": [top, *more], **arguments},
    )
    return runner


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_files_of_21_12_are_found_after_the_training(tmp_path):
    runner = train(str(tmp_path), profile=True, cpu=True)

    for loader in ("train", "valid", "infer"):
        rows = rows_of(tmp_path / "logs" / f"{loader}.csv")
        assert [row["step"] for row in rows] == ["1", "2"]
        assert float(rows[-1]["accuracy01"]) == runner.epoch_metrics[loader]["accuracy"]
        assert float(rows[-1]["loss"]) == runner.epoch_metrics[loader]["loss"]
        assert {"accuracy02"} <= set(rows[0]) and "accuracy" not in rows[0]
    assert os.listdir(tmp_path / "tb_profile")
    assert (tmp_path / "csv" / "valid.csv").exists()  # runnerkit's own are there too


def test_the_step_of_a_table_is_the_epoch_of_its_stage(tmp_path):
    """Also in a run that was interrupted, whose tables end with its last epoch, and then resumed."""

    class Stages(dl.SupervisedRunner):
        stages = ("first", "second")

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, runner=Stages(), cpu=True, more=[Interrupt(11)])
    assert [row["step"] for row in rows_of(tmp_path / "logs" / "valid.csv")] == ["1", "2", "1"]
    train(tmp_path, runner=Stages(), cpu=True, resume="auto")

    assert [row["step"] for row in rows_of(tmp_path / "logs" / "valid.csv")] == ["1", "2", "1", "2"]


def test_only_top_1_accuracy_has_another_name(tmp_path):
    """With its prefix and suffix; an accuracy of another kind keeps its name, as in Catalyst."""
    metric = dl.FunctionalBatchMetricCallback(
        lambda *_: torch.tensor(0.5), input_key="logits", target_key="targets", metric_key="accuracy"
    )
    other = dl.ControlFlowCallback(dl.AccuracyCallback(topk=1, prefix="my_", suffix="_cls"), loaders="valid")

    train(tmp_path, cpu=True, callbacks=[metric, other])

    [row, _] = rows_of(tmp_path / "logs" / "valid.csv")
    assert row.keys() == {"step", "accuracy", "loss", "my_accuracy01_cls"}


def test_evaluation_writes_no_files(tmp_path):
    runner = train(tmp_path, cpu=True)
    shutil.rmtree(tmp_path / "logs")

    runner.evaluate_loader(DataLoader(TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long)), batch_size=4))

    assert not (tmp_path / "logs").exists()


def test_a_store_gets_the_files(tmp_path):
    train(f"file://{tmp_path}/run", cpu=True)

    assert [row["step"] for row in rows_of(tmp_path / "run" / "logs" / "valid.csv")] == ["1", "2"]


def test_two_processes_write_the_files_once(tmp_path):
    train(tmp_path, ddp=True)

    assert [row["step"] for row in rows_of(tmp_path / "logs" / "valid.csv")] == ["1", "2"]


def test_without_a_folder_nothing_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    train(None, cpu=True)

    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["contrib", "data", "dl", "metrics", "registry", "settings", "utils"])
def test_each_namespace_is_found_by_a_program_that_imports_nothing_else(name):
    code = f"from runnerkit.catalyst import {name}; print({name}.__name__)"

    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)

    assert found.stdout.strip() in (f"runnerkit.{name}", f"runnerkit.catalyst.{name}")


def test_programs_find_the_namespaces_of_runnerkit():
    from runnerkit import dl as ours

    assert dl.AccuracyCallback is ours.AccuracyCallback
    assert issubclass(dl.SupervisedRunner, ours.SupervisedRunner)
    assert issubclass(dl.SelfSupervisedRunner, ours.SelfSupervisedRunner)
    assert issubclass(dl.Runner, ours.Runner)
    assert metrics.AccuracyMetric.__module__.startswith("runnerkit.metrics")
    assert set(dir(ours)) <= set(dir(dl))


def test_classes_in_the_registry_stay_what_they_are():
    @REGISTRY.add
    class Model(nn.Module):
        pass

    @Registry
    class Other(nn.Module):
        pass

    assert REGISTRY.get("Model") is Model and REGISTRY.get("Other") is Other
    assert isinstance(Model(), nn.Module)


def test_settings_tell_what_a_program_may_use():
    assert (torch.cuda.is_available(), torch.cuda.device_count()) == (IS_CUDA_AVAILABLE, NUM_CUDA_DEVICES)
    assert SETTINGS.ml_required and SETTINGS.amp_required and not SETTINGS.fairscale_required
    assert find_spec("mlflow") and not SETTINGS.mlflow_required  # the arguments of its logger differ
    with pytest.raises(AttributeError, match="ml_required"):
        _ = SETTINGS.debug


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_ntxent_is_the_closed_form(reduction):
    """-log of a pair's share of exp(cosine / tau) among all other samples, arXiv:2002.05709."""
    draw = torch.Generator().manual_seed(0)
    left, right = torch.randn(5, 7, generator=draw), torch.randn(5, 7, generator=draw)
    views = nn.functional.normalize(torch.cat([left, right])).double()
    similar = (views @ views.T / 0.2).exp()
    each = [-math.log(similar[i, (i + 5) % 10] / (similar[i].sum() - similar[i, i])) for i in range(10)]
    expected = sum(each) / (10 if reduction == "mean" else 1)

    assert NTXentLoss(0.2, reduction)(left, right).item() == pytest.approx(expected, rel=1e-5)


def test_ntxent_refuses_another_reduction():
    with pytest.raises(ValueError, match="reduction"):
        NTXentLoss(0.1, reduction="none")


@pytest.mark.parametrize(("normalize", "dtype", "brightest"), [(None, np.uint8, 255), ((0.5, 0.25), np.float32, 2)])
def test_mnist_as_arrays(tmp_path, normalize, dtype, brightest):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, 1, 2, 3) + bytes([0] * 5 + [255]))
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, 1) + bytes([7]))

    image, target = MNIST(tmp_path, normalize=normalize, numpy=True)[0]

    assert (type(image), image.shape, image.dtype, image.max(), target) == (np.ndarray, (2, 3), dtype, brightest, 7)
    assert MNIST(tmp_path, normalize=normalize)[0][0].shape == (1, 2, 3)
