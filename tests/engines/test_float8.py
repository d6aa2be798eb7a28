"""Linear layers in float8, emulated on the CPU, beside the hand-written loop with torchao."""

import logging
import sys

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from runnerkit import dl
from tests import tiny
from tests.engines.on_cpu import ddp
from tests.engines.together import together
from tests.interrupt import Interrupt
from tests.tiny import weights

float8 = pytest.importorskip("torchao.float8")


def make_model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))


def data_set():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(48, 32, generator=generator)
    return TensorDataset(features, features[:, :3].argmax(1))


def train(precision=None, *, model=None, engine=None, **options):
    model = model or make_model()
    engine = engine or dl.CPUEngine(precision=precision or dl.Float8(emulate=True))
    data = {"train": DataLoader(data_set(), 8, shuffle=True), "valid": DataLoader(data_set(), 8)}
    options = {"optimizer": tiny.sgd(model), "loaders": data, "num_epochs": 2, **options}
    return model, tiny.train(model, engine=engine, **options)


def test_a_run_is_the_hand_written_loop_with_torchao():
    """Bit for bit; the last layer, of size 3, stays in bf16."""
    order = []

    class Order(dl.Callback):
        def on_batch_start(self, runner):
            if runner.is_train_loader:
                order.append((runner.batch["features"].clone(), runner.batch["targets"].clone()))

    found, _ = train(callbacks=[Order()])

    model = make_model()
    optimizer = tiny.sgd(model)
    config = float8.Float8LinearConfig.from_recipe_name("tensorwise")
    config = type(config)(**{**vars(config), "emulate": True})
    float8.convert_to_float8_training(model, module_filter_fn=lambda _, name: name in ("0", "2"), config=config)
    for features, targets in order:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(features), targets)
        loss.backward()
        optimizer.step()

    assert torch.equal(weights(found), weights(model))


def test_the_callers_model_has_its_own_layers_again():
    """They hold the trained weights, in float32."""
    model = make_model()
    layers, before = list(model), weights(model)

    trained, runner = train(model=model)

    assert [type(each) for each in trained if isinstance(each, nn.Linear)] == [nn.Linear] * 3
    assert all(one is other for one, other in zip(layers, trained, strict=True))
    assert not torch.equal(weights(trained), before) and weights(trained).dtype == torch.float64
    assert all(parameter.dtype == torch.float32 for parameter in trained.parameters())
    assert runner.epoch_metrics["valid"]["loss"] < 1.2


def test_a_filter_leaves_layers_out():
    replaced = []
    precision = dl.Float8(emulate=True, filter_fn=lambda module, name: replaced.append(name) or name == "0")

    class Look(dl.Callback):
        def on_stage_start(self, runner):
            self.kinds = [type(each).__name__ for each in runner.model]

    look = Look()
    train(precision, callbacks=[look], num_epochs=1)

    assert replaced == ["0", "2"]
    assert look.kinds == ["Float8Linear", "ReLU", "Linear", "ReLU", "Linear"]


def test_a_run_resumes_bit_for_bit_and_in_another_precision(tmp_path):
    expected, _ = train(logdir=tmp_path / "whole")
    save = dl.CheckpointCallback(tmp_path / "log", content="runner", every_steps=1)
    with pytest.raises(KeyboardInterrupt):
        train(logdir=tmp_path / "log", callbacks=[save, Interrupt(9)])
    resumed, _ = train(logdir=tmp_path / "log", resume="auto")
    other, _ = train(dl.FP32(), logdir=tmp_path / "whole", resume="auto", num_epochs=3)

    assert torch.equal(weights(resumed), weights(expected))
    assert torch.isfinite(weights(other)).all()


def of_two():
    model, runner = train(engine=ddp(precision=dl.Float8(emulate=True)), num_epochs=4)
    return [type(each).__name__ for each in model], runner.epoch_metrics["valid"]["loss"]


def test_two_processes_train_with_it():
    kinds, loss = together(of_two)

    assert "Float8Linear" not in kinds
    assert loss < 1.0


def test_what_is_missing_is_named(monkeypatch, caplog):
    with pytest.raises(RuntimeError, match=r"precision='fp8' needs a GPU with float8 .* and this is cpu: use 'bf16'"):
        train(dl.Float8())
    with pytest.raises(ValueError, match="recipe_name row not in valid names"):
        dl.Float8("row").check()
    with caplog.at_level(logging.WARNING):
        train(model=nn.Linear(32, 3), num_epochs=1)
    assert "no nn.Linear within the model has sizes that are multiples of 16" in caplog.text
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ImportError, match=r"precision='fp8' needs torchao: pip install runnerkit\[float8\]"):
        dl.Float8().check()
