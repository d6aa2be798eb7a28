"""Exported models give the model's outputs for batches of any length, without its code."""

import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl, utils
from tests.tiny import NUM_FEATURES, classification, loader, mlp, train

FEATURES = torch.randn(7, NUM_FEATURES, generator=torch.Generator().manual_seed(3))


def export(*callbacks, model=None, batch_size=4, **options):
    loaders = {"train": loader(16, batch_size), "valid": loader(8, 4, seed=1)}
    model = model or mlp(dropout=0.5, batch_norm=True)
    return train(model, loaders=loaders, callbacks=list(callbacks), num_epochs=3, **options)


def answers(model, features=FEATURES):
    with torch.no_grad():
        return model.eval()(features)


def program(path):
    return torch.export.load(path).module()


def onnx_answers(path, features=FEATURES):
    session = onnxruntime.InferenceSession(path)
    (logits,) = session.run(None, {session.get_inputs()[0].name: features.numpy()})
    return torch.from_numpy(logits)


def test_a_traced_model_is_the_last_one(tmp_path):
    """The export is in evaluation mode and accepts other batch sizes, and the run keeps its own model."""
    runner = export(dl.TracingCallback(), logdir=tmp_path)

    torch.testing.assert_close(program(tmp_path / "traced_model.pt2")(FEATURES), answers(runner.model))
    assert sorted(each.name for each in tmp_path.glob(".*.tmp")) == []


def test_the_best_model_is_exported_if_asked(tmp_path):
    """The best checkpoint's model differs from the last one."""
    best = {"monitor": "valid/loss", "mode": "max"}  # the first epoch
    runner = export(dl.TracingCallback(which="best"), logdir=tmp_path, **best)
    expected = dl.SupervisedRunner(mlp(dropout=0.5, batch_norm=True)).load(tmp_path, which="best").model

    traced = program(tmp_path / "traced_model.pt2")(FEATURES)

    torch.testing.assert_close(traced, answers(expected))
    assert not torch.allclose(traced, answers(runner.model), atol=1e-3)


@pytest.mark.parametrize("batch_size", [4, 1])
def test_an_onnx_model_gives_the_same_answers(tmp_path, batch_size):
    """onnxruntime gives the same outputs, even if the model was traced with one row."""
    callback = dl.OnnxCallback(input_names=["features"], output_names=["logits"])

    runner = export(callback, model=mlp(), logdir=tmp_path, batch_size=batch_size)

    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    torch.testing.assert_close(onnx_answers(tmp_path / "model.onnx"), answers(runner.model), rtol=0, atol=1e-5)
    assert [each.name for each in (*session.get_inputs(), *session.get_outputs())] == ["features", "logits"]


def test_a_quantized_model_is_smaller_and_near(tmp_path):
    """8-bit weights take a quarter of the bytes; outputs agree to hundredths of their spread, on any CPU."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(NUM_FEATURES, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 3))

    runner = export(dl.OnnxCallback(), dl.QuantizationCallback(), model=model, logdir=tmp_path)

    floats, quantized = tmp_path / "model.onnx", tmp_path / "quantized_model.onnx"
    expected, given = answers(runner.model), onnx_answers(quantized)
    assert quantized.stat().st_size < 0.3 * floats.stat().st_size
    assert 0 < (given - expected).abs().max() < 0.05 * expected.std()


def test_quantized_weights_are_unsigned(tmp_path):
    """Sums of signed products overflow on CPUs with AVX2 but without VNNI: logits were off by a sixth."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 3)).eval()
    images = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    file = utils.quantize_onnx(utils.onnx_export(model, images, tmp_path / "model.onnx"), tmp_path / "int8.onnx")

    weights = [each for each in onnx.load(file).graph.initializer if each.name.endswith("_quantized")]
    expected = model(images).detach()

    assert [each.data_type for each in weights] == [onnx.TensorProto.UINT8] * 2
    assert (onnx_answers(file, images) - expected).abs().max() < 0.1 * expected.std()


class TwoInputs(nn.Linear):
    """A model with one positional and one keyword argument."""

    def forward(self, features, *, scale):
        return super().forward(features) * scale[:, None]


@pytest.mark.parametrize("input_key", [None, {"features": "features", "scale": "scale"}])
def test_a_model_is_called_as_the_run_calls_it(tmp_path, input_key):
    """The arguments are those of the run's first call, or the given keys of the batch."""

    class ByName(dl.SupervisedRunner):
        def handle_batch(self, batch):
            features, targets = batch["features"], batch["targets"]
            scale = torch.ones(len(features))
            logits = self.model(features=features, scale=scale)
            self.batch = {"features": features, "scale": scale, "targets": targets, "logits": logits}

    runner = export(dl.TracingCallback(input_key), model=TwoInputs(NUM_FEATURES, 3), logdir=tmp_path, runner=ByName())

    scale = torch.arange(7.0)
    traced = program(tmp_path / "traced_model.pt2")(features=FEATURES, scale=scale)
    torch.testing.assert_close(traced, runner.model(FEATURES, scale=scale))


def test_two_processes_write_one_file(tmp_path):
    """Rank zero writes the DDP model, here to another folder."""
    runner = export(dl.TracingCallback(logdir=tmp_path / "here", filename="mine.pt2"), model=mlp(), num_processes=2)

    assert [each.name for each in (tmp_path / "here").iterdir()] == ["mine.pt2"]
    torch.testing.assert_close(program(tmp_path / "here" / "mine.pt2")(FEATURES), answers(runner.model))


@pytest.mark.parametrize("make", [dl.TracingCallback, dl.OnnxCallback, dl.QuantizationCallback])
def test_what_cannot_be_traced_leaves_no_file(tmp_path, make):
    """The error names the callback, the model and a remedy, with torch's error as its cause; checkpoints are kept."""

    class Branch(nn.Linear):
        def forward(self, features):
            return super().forward(features) if features.sum() > -1e9 else features

    words = f"{make.__name__} cannot export Branch: .* branch on values .* or leave out the callback"
    with pytest.raises(RuntimeError, match=words) as caught:
        export(make(), model=Branch(NUM_FEATURES, 3), logdir=tmp_path)

    assert "data-dependent" in str(caught.value.__cause__).lower()
    assert not list(tmp_path.glob("*.pt2")) and not list(tmp_path.glob("*.onnx")) and not list(tmp_path.glob(".*.tmp"))
    assert (tmp_path / "checkpoints" / "last.pth").exists()


def test_a_run_that_has_nothing_left_to_do_exports_nothing(tmp_path, caplog):
    """Without batches, the model cannot be traced, and a warning says so."""
    export(logdir=tmp_path)

    export(dl.TracingCallback(), logdir=tmp_path, resume="auto")

    assert "traced_model.pt2 was not written: export needs the shapes of a batch" in caplog.text


def test_functions_do_the_same_without_a_run(tmp_path):
    """`utils.trace_model`, `onnx_export` and `quantize_onnx` work without a run."""
    model = mlp()

    traced = utils.trace_model(model, FEATURES)
    path = utils.onnx_export(model, (FEATURES,), tmp_path / "new" / "model.onnx")
    small = utils.quantize_onnx(path, tmp_path / "int8.onnx")

    assert model.training, "the model stays in training mode"
    batch = next(iter(DataLoader(classification(5), batch_size=5)))[0]
    torch.testing.assert_close(traced.module()(batch), answers(model, batch))
    torch.testing.assert_close(onnx_answers(path, batch), answers(model, batch), rtol=0, atol=1e-5)
    torch.testing.assert_close(onnx_answers(small, batch), answers(model, batch), rtol=0, atol=0.05)
