"""Tests that configs may have the old names of arguments, with warnings that are written as YAML."""

import json
import warnings
from pathlib import Path

import pytest

from runnerkit.commands.cli import main
from runnerkit.commands.config import read_config
from runnerkit.commands.configured_run import make_run
from runnerkit.monitor import Monitor
from tests.test_one_way_to_say_it import observed

CONFIG = """
model: {_target_: tests.tiny.mlp}
criterion: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loaders:
  train: {_target_: tests.tiny.loader, num_samples: 16, batch_size: 4}
  valid: {_target_: tests.tiny.loader, num_samples: 8, batch_size: 4}
loggers: {console: null}
callbacks:
  - {_target_: runnerkit.dl.CheckpointCallback, logdir: log, CHECKPOINT}
engine: cpu
"""
OLD_YAML = CONFIG.replace("CHECKPOINT", "loader_key: valid, metric_key: loss, minimize: true, topk: 2, mode: runner")
NEW_YAML = CONFIG.replace("CHECKPOINT", "monitor: valid/loss, mode: min, keep_best: 2, content: runner")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_configs_may_have_old_names(tmp_path, monkeypatch):
    """Components and the keys of `train` are as those of the new names."""
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(f"{OLD_YAML}valid_metric: loss\nminimize_valid_metric: true\n")
    Path("new.yaml").write_text(f"{NEW_YAML}monitor: valid/loss\nmode: min\n")

    callbacks = []
    for name in ("old.yaml", "new.yaml"):
        runner, arguments = make_run(read_config(Path(name)))
        callbacks.append(arguments["callbacks"][0])
        runner.train(**{**arguments, "callbacks": None, "logdir": Path(name).stem})

    assert observed(callbacks[0]) == observed(callbacks[1])
    assert callbacks[1].monitor == Monitor("valid", "loss", minimize=True)
    old, new = (json.loads(Path(name, "checkpoints", "index.json").read_text()) for name in ("old", "new"))
    assert [each["score"] for each in old["checkpoints"]] == [each["score"] for each in new["checkpoints"]]


def test_warnings_of_a_config_are_written_as_yaml(tmp_path, monkeypatch):
    """They name the file, the place of the component and the lines to write, which do not warn."""
    monkeypatch.chdir(tmp_path)
    Path("old.yaml").write_text(f"{OLD_YAML}valid_metric: loss\nminimize_valid_metric: true\n")
    Path("new.yaml").write_text(f"{NEW_YAML}monitor: valid/loss\nmode: min\n")

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        make_run(read_config(Path("old.yaml")))
    make_run(read_config(Path("new.yaml")))

    of_train, of_callback = (str(each.message) for each in caught)
    assert "old.yaml: valid_metric: loss, minimize_valid_metric: true is deprecated" in of_train
    assert of_train.endswith("write monitor: valid/loss, mode: min")
    assert "old.yaml: callbacks.0: mode: runner, topk: 2, loader_key: valid, " in of_callback
    assert of_callback.endswith("write content: runner, keep_best: 2, monitor: valid/loss, mode: min")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("topk: 2", "keep_best: 3", "callbacks.0: .*without the old topk"),
        ("loader_key: valid", "metric_key: 3", "callbacks.0: .*metric_key must be a str"),
        ("valid_metric: loss", "monitor: valid/loss", "c.yaml: train: pass monitor alone"),
    ],
)
def test_a_config_with_both_names_is_refused(tmp_path, old, new, words):
    """The error names the file and the component."""
    config, lines = CONFIG.replace("CHECKPOINT", "save_last: true"), f"{old}\n{new}\n"
    if words.startswith("callbacks"):
        config, lines = CONFIG.replace("CHECKPOINT", f"{old}, {new}"), ""
    (tmp_path / "c.yaml").write_text(config + lines)

    with pytest.raises(ValueError, match=words):
        make_run(read_config(tmp_path / "c.yaml"))


def test_the_norm_of_a_clipping_is_written_as_yaml(tmp_path):
    clips = "_target_: runnerkit.dl.OptimizerCallback, grad_clip_norm: 0.5"
    text = CONFIG.replace("_target_: runnerkit.dl.CheckpointCallback, logdir: log, CHECKPOINT", clips)
    (tmp_path / "c.yaml").write_text(text)

    with pytest.warns(FutureWarning, match=r"callbacks.0: grad_clip_norm: 0.5 .*write gradient_clip: 0.5$"):
        _, arguments = make_run(read_config(tmp_path / "c.yaml"))

    assert arguments["callbacks"][0].grad_clip_params["max_norm"] == 0.5


@pytest.mark.parametrize("old", ["topk: 2", "minimize: true", "mode: runner, topk: 2"])
def test_a_nested_callback_of_a_config_is_found(tmp_path, old):
    """The place is that of the inner callback, which gets what was written."""
    inner = f"{{_target_: runnerkit.dl.CheckpointCallback, logdir: log, {old}}}"
    outer = f"_target_: runnerkit.dl.ControlFlowCallback, epochs: 1, base_callback: {inner}"
    text = CONFIG.replace("_target_: runnerkit.dl.CheckpointCallback, logdir: log, CHECKPOINT", outer)
    (tmp_path / "c.yaml").write_text(text)

    with pytest.warns(FutureWarning, match=r"c\.yaml: callbacks\.0\.base_callback: "):
        _, arguments = make_run(read_config(tmp_path / "c.yaml"))

    assert arguments["callbacks"][0].callback.keep_best == (2 if "topk" in old else 1)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_search_may_have_old_names(tmp_path, monkeypatch, capsys):
    """The same trials, and the same best value."""
    monkeypatch.chdir(tmp_path)
    names = {"old": "valid_metric: loss", "new": "monitor: valid/loss", "most": "monitor: valid/loss\nmode: max"}
    config = CONFIG.partition("callbacks:")[0]
    for name, lines in names.items():
        Path(f"{name}.yaml").write_text(f"{config}{lines}\n")
        assert main(["tune", f"{name}.yaml", "--trials", "3", "--engine", "cpu", "optimizer.lr=1e-9,0.3"]) == 0

    best = [line for line in capsys.readouterr().out.splitlines() if line.startswith("best: ")]
    assert best[0] == best[1] < best[2]
