"""Tests of `runnerkit export LOGDIR OUT --format hf`."""

import json
import shutil
from pathlib import Path

import pytest

from runnerkit.commands.cli import main
from tests.pretrained import CONFIG, Tied, assert_same, files_of, read_by_hugging_face, train
from tests.tiny import sgd


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Return a logdir and the model whose weights it holds."""
    folder, model = tmp_path_factory.mktemp("run"), Tied(seed=1)
    train(model, folder=folder, optimizer=sgd(model))
    return folder, model


@pytest.mark.parametrize("option", ["--to", "--format"])
def test_the_command_exports(tmp_path, run, capsys, option):
    """OUT is an argument or --output; --config and --max-shard-size apply."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    common = [option, "hf", "--config", str(tmp_path), "--max-shard-size", "0.4KB", "--which", "last"]

    for number, place in enumerate((["{}"], ["-o", "{}"])):
        out = tmp_path / str(number)
        assert main(["export", str(run[0]), *(word.format(out) for word in place), *common]) == 0
        assert Path(capsys.readouterr().out.strip()) == out
        assert "model.safetensors.index.json" in files_of(out)
        assert_same(read_by_hugging_face(out), run[1])


def test_the_command_takes_the_config_of_the_model_in_the_logdir(tmp_path, run, capsys):
    shutil.copytree(run[0], tmp_path / "log")
    (tmp_path / "log" / "config.yml").write_text("model: {_target_: tests.pretrained.Configured}\n")

    assert main(["export", str(tmp_path / "log"), "--format", "hf", "--which", "last"]) == 0

    out = Path(capsys.readouterr().out.strip())
    assert out == tmp_path / "log" / "hf"
    assert json.loads((out / "config.json").read_text()) == {**CONFIG, "architectures": ["Configured"]}
    assert_same(read_by_hugging_face(out), run[1])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "hf", "--which", "last"], "from_pretrained needs a config.json: pass as config"),
        (["a", "-o", "b", "--to", "hf"], "pass either OUT or --output, got a and b"),
        (["--to", "onnx", "--config", "c.json"], "--config is an option of --to hf, got --to onnx"),
        (["--to", "safetensors", "--max-shard-size", "1GB"], "--max-shard-size is an option of --to hf, got --to sa"),
    ],
)  # fmt: skip
def test_what_the_command_does_not_take_is_one_line(run, arguments, words, capsys):
    assert main(["export", str(run[0]), *arguments]) == 2

    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1
