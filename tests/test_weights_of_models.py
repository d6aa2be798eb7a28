"""The functions of `runnerkit.utils` for weights: frozen, averaged, quantized."""

import io
import sys

import pytest
import torch
from torch import nn

from runnerkit import utils
from tests.tiny import mlp, train, weights


def test_requires_grad_is_set_for_all_or_by_name():
    model = mlp()
    utils.set_requires_grad(model, False)
    assert not any(each.requires_grad for each in model.parameters())

    utils.set_requires_grad(model, {name: name.endswith("bias") for name, _ in model.named_parameters()})
    assert {name for name, each in model.named_parameters() if each.requires_grad} == {"0.bias", "3.bias"}
    with pytest.raises(KeyError, match=r"requires_grad lacks parameter '0\.weight'"):
        utils.set_requires_grad(model, {})


def test_soft_update_is_the_formula():
    target, source = mlp(seed=1), mlp(seed=2)
    expected = 0.9 * weights(target) + 0.1 * weights(source)
    utils.soft_update(target, source, tau=0.1)

    torch.testing.assert_close(weights(target), expected, rtol=0, atol=1e-7)
    with pytest.raises(ValueError, match="zip"):
        utils.soft_update(target, nn.Linear(1, 1), tau=0.1)
    with pytest.raises(ValueError, match=r"tau must be in \[0, 1\], got 1.5"):
        utils.soft_update(target, target, tau=1.5)


def test_wrappers_are_taken_off():
    model = mlp()
    assert utils.get_nn_from_ddp_module(nn.DataParallel(nn.DataParallel(model))) is model
    assert utils.get_nn_from_ddp_module(model) is model


def test_averages_are_means_in_float64():
    """Low precision is summed exactly; counters are those of the last."""
    generator = torch.Generator().manual_seed(0)
    states = [
        {"w": torch.randn(50, generator=generator).to(torch.bfloat16), "n": torch.tensor(step)} for step in range(7)
    ]
    mean = torch.stack([each["w"].double() for each in states]).mean(dim=0).to(torch.bfloat16)

    average = utils.average_weights(states)
    assert torch.equal(average["w"], mean) and average["n"] == 6
    with pytest.raises(ValueError, match="needs one state_dict or more"):
        utils.average_weights([])
    with pytest.raises(ValueError, match=r"state_dicts\[1\] and state_dicts\[0\] differ in the names \['n', 'w'\]"):
        utils.average_weights([states[0], {}])
    with pytest.raises(ValueError, match=r"state_dicts\[1\] and state_dicts\[0\] differ in the shapes of \['w'\]"):
        utils.average_weights([states[0], {**states[0], "w": torch.ones(7, 7)}])


def test_checkpoints_are_averaged_by_pattern(tmp_path):
    """The pattern may name the logdir or its checkpoints; files of plain weights count too."""
    train(logdir=tmp_path)
    torch.save(mlp(seed=5).state_dict(), tmp_path / "checkpoints" / "other.pth")
    paths = sorted((tmp_path / "checkpoints").glob("*.pth"))
    other = mlp(seed=7)
    mean = sum(weights(_filled(other, utils.load_checkpoint(path))) for path in paths) / len(paths)

    for found in (
        utils.get_averaged_weights_by_path_mask(str(tmp_path / "*.pth")),
        utils.get_averaged_weights_by_path_mask(str(tmp_path / "checkpoints" / "*.pth")),
        utils.get_averaged_weights_by_path_mask("*.pth", logdir=tmp_path),
    ):
        other.load_state_dict(found)
        torch.testing.assert_close(weights(other), mean, rtol=0, atol=1e-6)
    assert len(paths) > 1
    with pytest.raises(FileNotFoundError, match=r"no checkpoint matches .*none"):
        utils.get_averaged_weights_by_path_mask(str(tmp_path / "none*"))


def _filled(model, state):
    model.load_state_dict(state.get("model_state_dict", state))
    return model


def test_a_quantized_model_is_close_to_the_model():
    """Its linear layers are a quarter of the size; the model itself is not changed."""
    pytest.importorskip("torchao")
    model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 8)).train()
    before, x = weights(model), torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    quantized = utils.quantize_model(model)

    expected = model.eval()(x)
    torch.testing.assert_close(quantized(x), expected, rtol=0, atol=0.05 * float(expected.detach().abs().max()))
    assert torch.equal(weights(model), before)
    sizes = []
    for each in (model, quantized):
        torch.save(each.state_dict(), file := io.BytesIO())
        sizes.append(len(file.getvalue()))
    assert sizes[1] < sizes[0] / 3


def test_quantization_without_torchao_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ImportError, match="quantize_model needs torchao: pip install"):
        utils.quantize_model(mlp())
