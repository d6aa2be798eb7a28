"""Options that every engine accepts: compile, channels_last, TF32 and cuDNN's benchmark."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from runnerkit.job_process import ThisProcess
from tests.interrupt import Interrupt
from tests.tiny import loader, mlp, sgd, train, train_by_hand, weights

BATCH_SIZE = 8


def supervised(model, batches, **options):
    return train(model, loaders={"train": batches, "valid": batches}, **options)


def images(num_samples):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randn(num_samples, 3, 8, 8, generator=generator)
    return TensorDataset(pixels, torch.randint(0, 3, (num_samples,), generator=generator))


def convnet():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = [nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)]
        return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), *head)


def as_dict(samples):
    features, targets = zip(*samples, strict=True)
    return {"features": torch.stack(features), "targets": torch.stack(targets)}


class LookAtModel(dl.Callback):
    """A callback that records the type of the runner's model and the memory layout of batches."""

    def __init__(self):
        super().__init__()
        self.kinds, self.layouts, self.weights = set(), set(), set()

    def on_batch_start(self, runner):
        self.kinds.add((runner.loader_key, type(runner.model).__name__))
        batch = runner.batch["features"] if isinstance(runner.batch, dict) else runner.batch[0]
        if batch.ndim == 4:
            self.layouts.add(batch.is_contiguous(memory_format=torch.channels_last))
            self.weights.add(runner.model[0].weight.is_contiguous(memory_format=torch.channels_last))


@pytest.mark.parametrize("compile", [True, {"backend": "aot_eager", "dynamic": False}], ids=str)
def test_compiled_models_train_to_the_same_weights(compile, monkeypatch):
    """torch.compile gets its arguments, and the user's module is restored; 1e-6, as fused kernels round differently."""
    arguments = []
    real = torch.compile

    def compile_quickly(module, **kwargs):
        arguments.append(kwargs)
        return real(module, backend="aot_eager")

    monkeypatch.setattr(torch, "compile", compile_quickly)
    mine, theirs, look = mlp(), mlp(), LookAtModel()

    runner = supervised(mine, loader(80, BATCH_SIZE), callbacks=[look], engine=dl.CPUEngine(compile=compile))
    train_by_hand(theirs, sgd(theirs), loader(80, BATCH_SIZE))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-6)
    assert arguments == [{} if compile is True else compile]
    assert look.kinds == {("train", "OptimizedModule"), ("valid", "OptimizedModule")}
    assert runner.model is mine


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler uses features that torch deprecates
def test_torch_compile_itself_runs():
    """The default backend builds kernels with a C++ compiler."""
    mine, theirs = mlp(), mlp()

    supervised(mine, loader(24, BATCH_SIZE), engine=dl.CPUEngine(compile={"mode": "default"}))
    train_by_hand(theirs, sgd(theirs), loader(24, BATCH_SIZE))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-5)


@pytest.mark.parametrize("compile", [True, {"modules": [nn.Linear]}], ids=str)
def test_data_parallel_cannot_compile(compile):
    """It copies the modules in each step, and compiled code belongs to a module. The error names an engine that can."""
    with pytest.raises(ValueError, match=r"use DistributedDataParallelEngine\(compile=\.\.\.\)"):
        dl.DataParallelEngine(compile=compile)


class Pair(NamedTuple):
    image: torch.Tensor
    mask: torch.Tensor


@dataclass
class Sample:
    image: torch.Tensor


def test_images_are_laid_out_wherever_they_stand_in_a_batch():
    """Lists, dicts, named tuples and dataclasses are searched; tensors without channels do not change."""
    image, mask = torch.zeros(2, 3, 4, 4), torch.zeros(2, 4)
    engine = dl.CPUEngine(channels_last=True)

    batch = engine.to_device({"pair": Pair(image, mask), "list": [image], "sample": Sample(image)})

    moved = [batch["pair"].image, batch["list"][0], batch["sample"].image]
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in moved)
    assert batch["pair"].mask is mask


def test_switches_are_put_back_after_a_prediction_too():
    """They are restored even if the iteration stops halfway."""
    before = torch.backends.cudnn.benchmark
    runner = dl.SupervisedRunner(model=mlp())
    predictions = runner.predict_loader(loader=loader(16, 4), engine=dl.CPUEngine(cudnn_benchmark=not before))

    next(predictions)
    during = torch.backends.cudnn.benchmark
    predictions.close()

    assert during is not before and torch.backends.cudnn.benchmark is before


@pytest.mark.parametrize("nested", [False, True], ids=["tuple", "dict"])
def test_channels_last_lays_out_images_and_weights(nested):
    """Batches and convolutions use the layout; weights agree to 1e-5, for another order of sums."""
    mine, theirs, look = convnet(), convnet(), LookAtModel()
    batches = DataLoader(images(40), BATCH_SIZE, collate_fn=as_dict if nested else None)
    supervised(mine, batches, callbacks=[look], engine=dl.CPUEngine(channels_last=True))
    train_by_hand(theirs, sgd(theirs), DataLoader(images(40), BATCH_SIZE))

    assert look.layouts == {True} and look.weights == {True}
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-5)


def switches():
    # These names are those that torch's compiler reads; torch refuses them after others were set.
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark


class LookAtSwitches(dl.Callback):
    """A callback that records torch's global settings during a run."""

    def on_batch_start(self, runner):
        self.seen = switches()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tf32": True, "cudnn_benchmark": True}, ("high", True, True)),
        ({"tf32": False, "cudnn_benchmark": False}, ("highest", False, False)),
        ({}, None),
    ],
    ids=str,
)
def test_switches_of_torch_hold_for_the_run_and_are_put_back(options, expected):
    """Settings belong to the process, so the previous values are restored; None leaves them unchanged."""
    before = switches()
    look = LookAtSwitches()

    supervised(mlp(), loader(16, BATCH_SIZE), callbacks=[look], engine=dl.CPUEngine(**options))

    assert look.seen == (expected or before)
    assert switches() == before


def test_switches_are_put_back_after_an_exception():
    """Settings are restored even if the run fails."""
    with pytest.raises(KeyboardInterrupt):
        supervised(mlp(), loader(16, BATCH_SIZE), callbacks=[Interrupt(1)], engine=dl.CPUEngine(cudnn_benchmark=True))

    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("engine", [dl.AMPEngine, dl.DataParallelAMPEngine, dl.DistributedDataParallelAMPEngine])
def test_a_name_with_amp_takes_no_other_precision(engine):
    """The name fixes the precision; other options are accepted."""
    with pytest.raises(TypeError, match="this engine's name fixes its precision"):
        engine(precision=None)
    assert engine(channels_last=True).channels_last


@pytest.mark.parametrize(
    ("backend", "is_built", "words"),
    [
        ("nccl", False, r"backend='nccl' needs NCCL, but this torch \(.*\) was built without it; omit backend"),
        ("cpu:gloo,cuda:nccl", False, r"backend='cpu:gloo,cuda:nccl' needs NCCL"),
        ("nccl", True, "backend='nccl' sends GPU tensors only, but this run is on the CPU; omit backend"),
    ],
)
@pytest.mark.parametrize("engine", [dl.DistributedDataParallelEngine, dl.FullyShardedDataParallelEngine])
def test_a_backend_that_cannot_work_is_refused_before_processes_start(monkeypatch, engine, backend, is_built, words):
    """The error says what to pass instead of torch's bare "doesn't have NCCL built in"."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: is_built)

    with pytest.raises(RuntimeError, match=words):
        engine(2, device="cpu", backend=backend).launch(lambda: None)


class Local(ThisProcess):
    """A launcher that counts its jobs."""

    num_jobs = 0

    def launch(self, fn):
        self.num_jobs += 1
        return super().launch(fn)


def test_a_launcher_may_be_an_attribute_and_another_value_of_that_name_is_refused():
    """An engine of 0.1.0 may have had such an attribute, which would hide the method."""

    class Own(dl.CPUEngine):
        def __init__(self, launcher):
            super().__init__()
            self.launcher = launcher

    engine = Own(None)
    engine.launcher = Local(engine)
    train(engine=engine)
    assert engine.launcher.num_jobs == 1

    for value in ("slurm", lambda: "slurm"):
        with pytest.raises(TypeError, match=r"Own.launcher must be a method that returns a Launcher, .* another name"):
            train(engine=Own(value))
