"""Tests of `deterministic=True`, of its warnings about what may still differ, and of the script's generators."""

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import nn

from runnerkit import dl
from runnerkit.loop.determinism import WORKSPACE_VARIABLE, what_may_differ
from runnerkit.seeding.generators import set_global_seed
from tests.interrupt import at
from tests.tiny import train


def modes():
    return torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.deterministic


def test_the_mode_is_on_for_the_run_only():
    """The mode is on during a run with `deterministic=True` and is reset afterwards, even after an exception."""
    seen = []
    note, fail = at("on_batch_start", lambda runner: seen.append(modes())), at("on_batch_end", lambda runner: 1 / 0)

    train(callbacks=[note], deterministic=True)
    with pytest.raises(ZeroDivisionError):
        train(callbacks=[note, fail], deterministic=True)
    seen.append(modes())
    train(callbacks=[note])

    assert seen == [(True, True)] * 5 + [(False, False)] * 5


def test_an_operation_that_has_no_such_algorithm_is_refused():
    """torch raises an error that names the operation, with a note of the batch, loader, epoch and rank."""

    class Puts(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 3)

        def forward(self, features):
            torch.zeros(3).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
            return self.linear(features)

    with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation") as caught:
        train(model=Puts(), deterministic=True)

    assert caught.value.__notes__[0].startswith("in batch 1 of loader 'train', epoch 1, rank 0")


def engine_on(device, **attributes):
    engine = dl.CPUEngine(**attributes)
    engine.device = torch.device(device)
    return engine


@pytest.mark.parametrize(("workspace", "is_good"), [(None, False), (":0:0", False), (":4096:8", True), (":16:8", True)])
def test_a_workspace_that_cublas_needs_is_asked_for(monkeypatch, workspace, is_good):
    """On GPUs, an unsuitable cuBLAS workspace variable is reported; cuBLAS reads it before a run could set it."""
    monkeypatch.setenv(WORKSPACE_VARIABLE, workspace or "")
    if workspace is None:
        monkeypatch.delenv(WORKSPACE_VARIABLE)

    found = what_may_differ(engine_on("cuda"))

    assert what_may_differ(engine_on("cpu")) == []
    assert [f"is {workspace!r}, so matrix products" in each for each in found] == [True] * (not is_good)


def test_what_torch_does_not_know_of_is_warned_about(caplog):
    """Autotuned kernels and devices without a deterministic mode cause warnings."""
    [autotuned] = what_may_differ(dl.CPUEngine(compile={"mode": "max-autotune"}))
    [device] = what_may_differ(engine_on("mps"))
    train(deterministic=True, engine=dl.CPUEngine())

    assert "selects the fastest kernels" in autotuned and "use cpu=True" in device
    assert "deterministic" not in caplog.text


def test_an_engine_names_what_its_own_communication_may_change():
    """Horovod's order of sums depends on time, unless there is one process only."""
    several, alone = dl.HorovodEngine(2, device="cpu"), dl.HorovodEngine(1, device="cpu")

    assert what_may_differ(several) == ["Horovod fuses gradients as they arrive: set HOROVOD_FUSION_THRESHOLD=0"]
    assert what_may_differ(alone) == what_may_differ(dl.DistributedDataParallelEngine(2, device="cpu")) == []


@pytest.mark.parametrize("error", [None, ZeroDivisionError])
def test_the_scripts_random_numbers_continue_after_a_run(error):
    """Models that a script makes between runs would otherwise start alike; also after a run that failed."""

    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    expected = [draw(), draw()]
    set_global_seed(0)  # as before this test

    found = [draw()]
    with nullcontext() if error is None else pytest.raises(error):
        train(callbacks=[at("on_epoch_end", lambda runner: 1 / (error is None))])
    found.append(draw())

    assert found == expected
