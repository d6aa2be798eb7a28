"""Tests of `runnerkit export`: exported files reproduce the model's outputs without its code."""

import shutil
from pathlib import Path

import onnxruntime
import pytest
import torch
import yaml
from safetensors.torch import load_file

from runnerkit.checkpoints.weights import load_weights
from runnerkit.commands.cli import main
from tests.test_search import CONFIG
from tests.tiny import NUM_FEATURES, mlp


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    """Return the logdir of a config that was trained."""
    folder = tmp_path_factory.mktemp("export")
    (folder / "config.yaml").write_text(CONFIG.replace("mode: max", "mode: min"))
    assert main(["run", str(folder / "config.yaml"), "--logdir", str(folder / "log")]) == 0
    return folder / "log"


def answers(path, features):
    """Return the outputs of an exported model in either format."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(features)
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"features": features.numpy()})
    return torch.from_numpy(logits)


@pytest.mark.parametrize(("to", "name"), [("onnx", "model.onnx"), ("torch-export", "model.pt2")])
@pytest.mark.parametrize("which", ["best", "last"])
def test_the_answers_are_the_models(logdir, capsys, to, name, which):
    """Outputs equal the model's for any batch size; ONNX differs by the rounding of float32 sums of 16 terms."""
    assert main(["export", str(logdir), "--to", to, "--which", which]) == 0

    path = Path(capsys.readouterr().out.strip())
    model = mlp(seed=9).eval()
    load_weights(model, logdir, which=which)
    assert path == logdir / name
    for length in (1, 7):
        features = torch.randn(length, NUM_FEATURES)
        torch.testing.assert_close(answers(path, features), model(features).detach(), rtol=1e-5, atol=1e-5)


def test_a_checkpoint_finds_the_config_of_its_logdir_and_safetensors_need_none(logdir, tmp_path):
    """The config of a checkpoint is found in its logdir, two folders up."""
    shutil.copytree(logdir / "checkpoints", tmp_path / "checkpoints")
    for folder, to, name in ((logdir, "torch-export", "a.pt2"), (tmp_path, "safetensors", "a.safetensors")):
        path = str(folder / "checkpoints" / "last.pth")
        assert main(["export", path, "--to", to, "-o", str(tmp_path / name)]) == 0

    model = mlp(seed=9)
    load_weights(model, logdir, which="last")
    torch.testing.assert_close(load_file(tmp_path / "a.safetensors"), dict(model.state_dict()), rtol=0, atol=0)
    assert (tmp_path / "a.pt2").is_file()


def set_key(key, value):
    """Return a function that sets a key in the saved config."""

    def change(folder):
        values = yaml.safe_load((folder / "config.yml").read_text())
        (folder / "config.yml").write_text(yaml.safe_dump({**values, key: value}))

    return change


SUPERVISED = {"_target_": "runnerkit.dl.SupervisedRunner"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "config.yml").unlink(), "log lacks config.yml, since a script trained the run"),
        (lambda folder: shutil.rmtree(folder / "checkpoints"), "no checkpoint"),
        (shutil.rmtree, "log: no such logdir or checkpoint"),
        (lambda folder: None, "cannot write /proc/a.safetensors"),
        (set_key("loaders", {"train": {}}), "loaders: expected an evaluation loader, got ['train']; a batch of it"),
        (set_key("model", {"a": {"_target_": "torch.nn.ReLU"}}), "model: is a dict; expected one model"),
        (set_key("runner", {**SUPERVISED, "input_key": {"features": "x"}}), "runner: missing a required argument"),
        (set_key("runner", {**SUPERVISED, "input_key": ["x", "y", "z"]}), "runner: input_key ['z'] not in the batch"),
    ],
)
def test_what_cannot_be_exported_is_one_line(logdir, tmp_path, monkeypatch, capsys, change, words):
    """An export that is impossible gives one line and exit code 2; a config in the current folder is not used."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(logdir / "config.yml", "config.yml")
    shutil.copytree(logdir, tmp_path / "log")
    change(tmp_path / "log")

    out = ["-o", "/proc/a.safetensors"] if "/proc" in words else []
    assert main(["export", "log", "--to", "safetensors" if out else "onnx", *out]) == 2

    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
