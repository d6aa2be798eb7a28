"""Tests of the choice of the device, and of training on it, with stand-ins for MPS, XPU and CUDA."""

import logging

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode  # tensors without data, on any device

from runnerkit import dl, utils
from runnerkit.engines.by_name import engine_by_name
from runnerkit.loop.environment import describe_environment
from runnerkit.metrics.classification import accuracy
from runnerkit.metrics.means import LoaderMeans
from runnerkit.precision import AMP
from runnerkit.seeding.generators import rng_state, set_rng_state
from runnerkit.types import widest_float
from tests.accelerators import Generators, on_the_host, show
from tests.tiny import loader, train, weights


@pytest.mark.parametrize(("kind", "count"), [(None, 0), ("cuda", 1), ("cuda", 4), ("mps", 1), ("xpu", 1), ("xpu", 2)])
def test_without_flags_the_engine_uses_the_accelerator(monkeypatch, kind, count):
    """CUDA, MPS or XPU, else the CPU; torch splits batches over several GPUs for CUDA only."""
    show(monkeypatch, kind, count=count)
    expected = {0: dl.CPUEngine, 4: dl.DataParallelEngine}.get(count, dl.GPUEngine)
    engine = dl.get_available_engine()

    assert type(engine) is expected
    assert engine._choose_device() == utils.get_device() == torch.device(kind or "cpu")
    assert type(engine_by_name(None)) is expected
    assert dl.AMPEngine()._choose_device() == torch.device(kind or "cpu")
    assert type(dl.get_available_engine(cpu=True)) is dl.CPUEngine
    assert type(dl.get_available_engine(ddp=True)) is dl.DistributedDataParallelEngine
    assert len(describe_environment()["gpus"]) == count


def test_a_torch_built_for_cuda_uses_the_cpu_without_a_gpu(monkeypatch):
    """torch.accelerator names what torch is built for, unless it is asked what is there; errors name the device."""
    show(monkeypatch, "cuda", is_there=False)

    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert type(dl.get_available_engine()) is dl.CPUEngine and utils.get_device() == torch.device("cpu")
    for engine, words in {dl.GPUEngine(): "", dl.DeviceEngine("mps"): "of type 'mps' "}.items():
        with pytest.raises(RuntimeError, match=f"needs a GPU {words}and torch sees none; use CPUEngine"):
            engine.check()


def test_an_index_is_torchs_current_device_during_the_run(monkeypatch):
    """Tensors that a user creates on "xpu" are on the GPU of the engine, and those after the run where they were."""
    show(monkeypatch, "xpu", count=2)
    current = [0]
    monkeypatch.setattr(torch.xpu, "current_device", lambda: current[-1])
    monkeypatch.setattr(torch.xpu, "set_device", lambda device: current.append(getattr(device, "index", device)))
    engine = dl.GPUEngine(1)

    engine.setup()
    during = (engine.device, current[-1])
    engine.cleanup()

    assert during == (torch.device("xpu", 1), 1) and current[-1] == 0


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_several_processes_use_the_cpu_beside_another_accelerator(monkeypatch, caplog, kind):
    """ddp=True says so, unless the user chose the CPU."""
    show(monkeypatch, kind)
    with caplog.at_level(logging.WARNING):
        dl.DistributedDataParallelEngine(device="cpu").check()
        silent = not caplog.records
        engine = dl.DistributedDataParallelEngine()
        engine.check()

    assert silent and engine.num_processes == 2
    assert f"uses the CPU, as training in several processes on {kind} was never tried" in caplog.text


@pytest.mark.parametrize(("kind", "is_native"), [("cuda", False), ("cuda", True), ("mps", False), ("xpu", False)])
def test_amp_is_fp16_where_bf16_is_only_emulated(monkeypatch, kind, is_native):
    """bf16 has the range of float32 and needs no scaler."""
    show(monkeypatch, kind)
    dtype, has_scaler = (torch.float16, True) if kind == "cuda" and not is_native else (torch.bfloat16, False)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: is_native or including_emulation
    )
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    precision = AMP()

    precision.setup(torch.device(kind))

    assert (precision._compute_dtype, precision.skips_steps) == (dtype, has_scaler)


@pytest.mark.parametrize(("kind", "count"), [("cuda", 2), ("mps", 1), ("xpu", 2)])
def test_checkpoints_hold_the_generators_of_the_accelerator(monkeypatch, kind, count):
    """A restored state draws the same numbers; one of a machine without this accelerator changes nothing there."""
    without = rng_state()
    show(monkeypatch, kind, count=count)
    generators = Generators(monkeypatch, kind, count=count)
    before = list(generators.states)

    saved = rng_state()
    generators.states = [state + 100 for state in before]
    set_rng_state(without)
    moved = list(generators.states)
    set_rng_state(saved)

    assert moved == [state + 100 for state in before] and generators.states == before
    monkeypatch.undo()
    set_rng_state(saved)  # on a machine without it


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps", "xpu"])
def test_metrics_use_float64_only_where_it_exists(monkeypatch, kind):
    """MPS and some XPUs lack float64: sums are float32 there, and counts integers."""
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda _: type("", (), {"has_fp64": False}))
    means = LoaderMeans()
    with FakeTensorMode():
        logits, targets = torch.zeros(8, 3, device=kind), torch.zeros(8, dtype=torch.int64, device=kind)
        loss = torch.zeros((), device=kind)

        means.update({"loss": loss, "accuracy": accuracy(logits, targets)[0], "count": targets.sum()}, 8)
        ((sums, _),) = means._sums.values()

    expected = torch.float64 if kind in ("cpu", "cuda") else torch.float32
    assert sums.device.type == kind and sums.dtype == widest_float(torch.device(kind)) == expected


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_the_default_engine_trains_on_the_accelerator(monkeypatch, tmp_path, kind):
    """Models, batches and metrics go to the device, never as float64; the run ends and resumes like one on the CPU."""

    def run(num_epochs, **options):
        loaders = {"train": loader(32, 8, shuffle=True), "valid": loader(20, 8)}
        callbacks = [dl.AccuracyCallback("logits", "targets"), dl.SystemMetricsCallback()]
        return train(loaders=loaders, callbacks=callbacks, num_epochs=num_epochs, **options)

    expected = run(2)
    show(monkeypatch, kind)
    Generators(monkeypatch, kind, count=1)
    monkeypatch.setattr(torch.xpu, "max_memory_allocated", lambda device: 2**30)
    with on_the_host(kind) as mode:
        run(1, logdir=tmp_path, engine=None)
        runner = run(2, logdir=tmp_path, engine=None, resume="auto")
        scores = runner.evaluate_loader(loader(20, 8))

    assert runner.engine.device == torch.device(kind) and mode.num_calls > 0
    assert torch.equal(weights(runner.model), weights(expected.model))
    assert runner.epoch_metrics["valid"]["loss"] == pytest.approx(expected.epoch_metrics["valid"]["loss"], rel=1e-6)
    assert scores["loss"] == pytest.approx(expected.epoch_metrics["valid"]["loss"], rel=1e-6)
