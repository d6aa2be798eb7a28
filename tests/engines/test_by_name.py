"""Engines chosen on the command line: their names, arguments and errors."""

import json

import numpy as np
import pytest
import torch

from runnerkit import dl, engines
from runnerkit.engines.by_name import ENGINES, VARIABLE, engine_by_name
from tests.tiny import train


def test_every_engine_has_its_name():
    """Every engine class has its name, besides the short names."""
    classes = {name for name in engines.__all__ if name.endswith("Engine") and name != "IEngine"}

    assert classes | {"cpu", "gpu", "dp", "ddp", "fsdp", "horovod"} == set(ENGINES)
    assert all(ENGINES[name] is getattr(dl, name) for name in classes)


@pytest.mark.parametrize(
    ("name", "precision", "dtype"),
    [("cpu", "bf16", torch.bfloat16), ("ddp", "fp16", torch.float16), ("dp", "amp", None), ("cpu", "fp32", "none")],
)
def test_the_precision_is_the_one_asked_for(name, precision, dtype):
    """`amp` leaves the dtype to the device, and fp32 has none."""
    engine = engine_by_name(name, precision=precision)

    assert type(engine) is ENGINES[name]
    assert getattr(engine.precision, "dtype", "none") == dtype


def test_without_a_name_the_number_of_processes_or_the_machine_chooses():
    """Several processes use DDP; one uses this machine's devices."""
    several, one = engine_by_name(None, num_processes=3), engine_by_name(None, precision="bf16")

    assert isinstance(several, dl.DistributedDataParallelEngine) and several.num_processes == 3
    assert isinstance(one, dl.GPUEngine | dl.DataParallelEngine if torch.cuda.is_available() else dl.CPUEngine)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "dpp"}, "unknown engine 'dpp'; expected one of cpu, gpu, dp, ddp, fsdp, horovod, AMPEngine"),
        ({"name": "cpu", "num_processes": 2}, "engine 'cpu' runs in one process, so it does not accept num_proc"),
        ({"name": "ddp", "num_processes": 0}, "the number of processes must be >= 1, got 0"),
        ({"name": "ddp", "precision": "fp4"}, "unknown precision 'fp4'; expected one of fp32, amp, fp16, bf16, fp8"),
        ({"name": "ddp", "launcher": "slurm"}, "unknown launcher 'slurm'; expected 'ray' or a RayLauncher"),
        ({"name": "cpu", "launcher": "ray"}, "engine 'cpu' does not accept a launcher, got 'ray'; use 'ddp' or 'fsdp'"),
        ({"name": None, "launcher": "ray"}, "launcher 'ray' needs the number of processes in the cluster: pass nproc"),
        ({"name": "horovod", "num_processes": (1, 2)}, "the number of processes must be one number without a launcher"),
        ({"name": "AMPEngine", "precision": "bf16"}, "engine 'AMPEngine' has a fixed precision"),
    ],
)
def test_what_there_is_none_of_is_refused(arguments, words):
    """The error lists the alternatives."""
    with pytest.raises(ValueError, match="^" + words):
        engine_by_name(**arguments)


def test_a_launcher_has_its_name():
    """Processes elsewhere use DDP, as several of this machine do; their number may be a range."""
    engine = engine_by_name(None, num_processes=(2, 4), launcher="ray")

    assert isinstance(engine, dl.DistributedDataParallelEngine) and engine.bounds == (2, 4)


def test_a_number_of_numpy_is_a_number_of_processes():
    """It is stored as an int, which environment.json can hold."""
    engine = engine_by_name("ddp", num_processes=np.int64(2))

    assert engine.bounds == (2, 2) and type(engine.num_processes) is int


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    """The error is raised before anything is constructed."""
    with pytest.raises(ValueError, match="engine 'gpu' needs a GPU and torch sees none; use 'cpu'"):
        engine_by_name("gpu")


def test_the_command_line_has_the_last_word(monkeypatch):
    """The command line overrides the script's engine; later runs in this process without it use the script's."""
    monkeypatch.setenv(VARIABLE, json.dumps({"name": "dp", "num_processes": None, "precision": "bf16"}))

    commanded = train().engine
    monkeypatch.delenv(VARIABLE)
    own = train().engine

    assert isinstance(commanded, dl.DataParallelEngine) and commanded.precision.dtype == torch.bfloat16
    assert isinstance(own, dl.CPUEngine)
