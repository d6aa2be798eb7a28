"""What every engine takes beside its own arguments: compile, channels_last, TF32, cuDNN's search."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests.tiny import loader, mlp, quiet, sgd, train_by_hand, weights

BATCH_SIZE = 8


def supervised(model, batches, **kwargs):
    return dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=sgd(model),
        loaders={"train": batches, "valid": batches},
        **quiet(),
        **kwargs,
    )


def images(num_samples):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(num_samples, 3, 8, 8, generator=generator), torch.randint(0, 3, (num_samples,), generator=generator)
    )


def convnet():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)
        )


def as_dict(samples):
    features, targets = zip(*samples, strict=True)
    return {"features": torch.stack(features), "targets": torch.stack(targets)}


class LookAtModel(dl.Callback):
    """Notes of what kind the runner's model is, and how a batch lies in memory."""

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
    """torch.compile gets its arguments; the user gets the bare module back. To 1e-6: fused kernels round otherwise."""
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
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's compiler warns of what torch itself uses
def test_torch_compile_itself_runs():
    """With its default backend, whose kernels a C++ compiler builds."""
    mine, theirs = mlp(), mlp()

    supervised(mine, loader(24, BATCH_SIZE), engine=dl.CPUEngine(compile={"mode": "default"}))
    train_by_hand(theirs, sgd(theirs), loader(24, BATCH_SIZE))

    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-5)


def test_data_parallel_cannot_compile():
    """It says which engine can."""
    with pytest.raises(ValueError, match=r"use DistributedDataParallelEngine\(compile=\.\.\.\)"):
        dl.DataParallelEngine(compile=True)


class Pair(NamedTuple):
    image: torch.Tensor
    mask: torch.Tensor


@dataclass
class Sample:
    image: torch.Tensor


def test_images_are_laid_out_wherever_they_stand_in_a_batch():
    """In lists, dicts, named tuples and dataclasses; what has no channels stays."""
    image, mask = torch.zeros(2, 3, 4, 4), torch.zeros(2, 4)
    engine = dl.CPUEngine(channels_last=True)

    batch = engine.to_device({"pair": Pair(image, mask), "list": [image], "sample": Sample(image)})

    moved = [batch["pair"].image, batch["list"][0], batch["sample"].image]
    assert all(each.is_contiguous(memory_format=torch.channels_last) for each in moved)
    assert batch["pair"].mask is mask


def test_switches_are_put_back_after_a_prediction_too():
    """Also when it is left half-way."""
    before = torch.backends.cudnn.benchmark
    runner = dl.SupervisedRunner(model=mlp())
    predictions = runner.predict_loader(loader=loader(16, 4), engine=dl.CPUEngine(cudnn_benchmark=not before))

    next(predictions)
    during = torch.backends.cudnn.benchmark
    predictions.close()

    assert during is not before and torch.backends.cudnn.benchmark is before


@pytest.mark.parametrize("nested", [False, True], ids=["tuple", "dict"])
def test_channels_last_lays_out_images_and_weights(nested):
    """Batches and convolutions; the numbers stay, to 1e-5 for another order of sums."""
    mine, theirs, look = convnet(), convnet(), LookAtModel()
    batches = DataLoader(images(40), BATCH_SIZE, collate_fn=as_dict if nested else None)
    supervised(mine, batches, callbacks=[look], engine=dl.CPUEngine(channels_last=True))
    train_by_hand(theirs, sgd(theirs), DataLoader(images(40), BATCH_SIZE))

    assert look.layouts == {True} and look.weights == {True}
    torch.testing.assert_close(weights(mine), weights(theirs), rtol=0, atol=1e-5)


def switches():
    # By the names that torch's compiler reads, which torch refuses after others were set.
    return torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark


class LookAtSwitches(dl.Callback):
    """Notes how torch is set while a run is under way."""

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
    """They are the process's, so what was set before is set again; None leaves them alone."""
    before = switches()
    look = LookAtSwitches()

    supervised(mlp(), loader(16, BATCH_SIZE), callbacks=[look], engine=dl.CPUEngine(**options))

    assert look.seen == (expected or before)
    assert switches() == before


def test_switches_are_put_back_after_an_exception():
    """Whatever ends the run."""

    class Fails(dl.Callback):
        def on_batch_start(self, runner):
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        supervised(mlp(), loader(16, BATCH_SIZE), callbacks=[Fails()], engine=dl.CPUEngine(cudnn_benchmark=True))

    assert torch.backends.cudnn.benchmark is False


@pytest.mark.parametrize("engine", [dl.AMPEngine, dl.DataParallelAMPEngine, dl.DistributedDataParallelAMPEngine])
def test_a_name_with_amp_takes_no_other_precision(engine):
    """Its name says which; other options pass through."""
    with pytest.raises(TypeError, match="this engine's name fixes its precision"):
        engine(precision=None)
    assert engine(channels_last=True).channels_last


@pytest.mark.parametrize(
    ("backend", "is_built", "words"),
    [
        ("nccl", False, r"backend='nccl' needs NCCL, and this torch \(.*\) was built without it; leave backend out"),
        ("cpu:gloo,cuda:nccl", False, r"backend='cpu:gloo,cuda:nccl' needs NCCL"),
        ("nccl", True, "backend='nccl' sends tensors of GPUs only, and this run is on the CPU; leave backend out"),
    ],
)
@pytest.mark.parametrize("engine", [dl.DistributedDataParallelEngine, dl.FullyShardedDataParallelEngine])
def test_a_backend_that_cannot_work_is_refused_before_processes_start(monkeypatch, engine, backend, is_built, words):
    """In words that say what to write instead of torch's bare "doesn't have NCCL built in"."""
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: is_built)

    with pytest.raises(RuntimeError, match=words):
        engine(2, device="cpu", backend=backend).launch(lambda: None)
