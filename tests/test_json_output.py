"""Tests of `--json`, whose output is described by a JSON schema."""

import json
import math
import re
import time
from pathlib import Path
from unittest.mock import Mock

import jsonschema
import pytest

from runnerkit import best_metrics, read_metrics
from runnerkit.commands import status_stream
from runnerkit.commands.cli import app, main
from runnerkit.commands.schema import schema_of
from runnerkit.loop import run_status
from runnerkit.storage.status_file import FILE
from tests.json_output import output
from tests.runs import fail_run, judge_run, log_run
from tests.storage.stored_runs import At
from tests.tiny import loader, train

CURVES = {
    "train": {"loss": [0.9, 0.5, math.nan], "odd": [math.inf, 1.0]},
    "valid": {"loss": [0.8, 0.7, 0.6], "accuracy": [0.5, 0.75, 0.625]},
}
CONFIG = """
model: {_target_: torch.nn.Linear, in_features: 6, out_features: 3}
criterion: {_target_: torch.nn.CrossEntropyLoss}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
loaders:
  train: {_target_: tests.tiny.loader, num_samples: 16, batch_size: 4}
  valid: {_target_: tests.tiny.loader, num_samples: 8, batch_size: 4}
monitor: valid/loss
engine: cpu
"""


def test_every_command_has_the_option_and_a_schema():
    """Only `schema` prints JSON anyway."""
    commands = {each.callback.__name__: each.callback for each in app.registered_commands}

    with_option = {name for name, each in commands.items() if "as_json" in each.__annotations__}
    assert with_option == commands.keys() - {"schema"}
    assert with_option <= schema_of()["$defs"].keys()
    jsonschema.Draft202012Validator.check_schema(schema_of())


def test_the_schema_of_an_unknown_output_is_refused(capsys):
    assert main(["schema", "metric"]) == 2
    assert "'metric'; choose from status, watch, metrics" in capsys.readouterr().err


def test_metrics_of_a_run_have_all_digits(tmp_path, capsys):
    """Passes and best values are those of the functions for Python; what is not finite is a string."""
    log_run(tmp_path / "digits", CURVES)

    shown = output(capsys, "metrics", tmp_path / "digits")

    values = {
        (each["loader"], each["epoch"], metric): float(value)
        for each in shown["passes"]
        for metric, value in each["metrics"].items()
    }
    table = read_metrics(tmp_path / "digits")
    logged = dict(zip(zip(table["loader"], table["epoch"], table["metric"], strict=True), table["value"], strict=True))
    assert values == pytest.approx(logged, nan_ok=True, rel=0, abs=0)
    assert (shown["run"], shown["status"]) == ("digits", None)
    assert [each["step"] for each in shown["passes"]] == [10, 10, 20, 20, 30, 30]
    assert [each["last"] for each in shown["best"]] == ["NaN", 1.0, 0.6, 0.625]
    best = {(each["loader"], each["metric"]): (each["best"], each["best_epoch"]) for each in shown["best"]}
    expected = best_metrics(tmp_path / "digits").set_index(["loader", "metric"]).loc[("valid", "loss")]
    assert best["valid", "loss"] == (expected["best"], expected["best_epoch"])
    assert best["valid", "accuracy"] == (None, None)


def test_any_name_is_one_line_in_any_encoding(tmp_path, capsys):
    """`splitlines` also splits at line separators of Unicode, and a terminal or a pipe need not be UTF-8."""
    name = "é\u2028\x85"
    log_run(tmp_path / "digits", {"valid": {name: [1.0]}})

    text = printed(capsys, "metrics", str(tmp_path), "--json")

    assert len(text.splitlines()) == 1 and text.isascii()
    assert json.loads(text)["passes"][0]["metrics"] == {name: 1.0}


def test_several_runs_are_compared(tmp_path, capsys):
    """The best run is first; a run without the metric has null, also one that failed before it logged anything."""
    for name, accuracies in {"one": [0.5, 0.6], "two": [0.5, 0.9]}.items():
        log_run(tmp_path / name, {"valid": {"accuracy": accuracies}})
        judge_run(tmp_path / name, "valid", "accuracy", minimize=False)
    log_run(tmp_path / "three", {"train": {"loss": [0.1]}})
    fail_run(tmp_path / "zero", "boom")

    shown = output(capsys, "metrics", tmp_path)

    assert (shown["metric"], shown["loader"]) == ("accuracy", "valid")
    assert [(each["run"], each["best"], each["last"]) for each in shown["runs"]] == [
        ("two", 0.9, 0.9), ("one", 0.6, 0.6), ("three", None, None), ("zero", None, None),
    ]  # fmt: skip
    assert shown["runs"][-1]["status"]["error"] == {"type": "ValueError", "message": "ValueError: boom"}


def test_a_hyperparameter_named_status_stays_beside_the_status_of_the_run(tmp_path, capsys):
    """As other names of columns, it has a prefix."""
    for name in ("one", "two"):
        log_run(tmp_path / name, CURVES)
        (tmp_path / name / "hparams.yml").write_text(f"status: {name}\n")

    rows = json.loads(printed(capsys, "metrics", str(tmp_path), "--json"))["runs"]

    assert {(each["run"], each["status"], each["hparams.status"]) for each in rows} == {
        ("one", None, "one"), ("two", None, "two"),
    }  # fmt: skip


def printed(capsys, *arguments):
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_metrics_take_one_format(tmp_path, capsys):
    log_run(tmp_path / "digits", CURVES)

    assert main(["metrics", str(tmp_path / "digits"), "--csv", "--json"]) == 2
    assert "either --csv or --json" in capsys.readouterr().err


def test_the_status_is_shown_where_a_run_is_looked_at(tmp_path, capsys):
    """`metrics`, `watch` and `doctor` read the file; text names the state unless the run has finished."""

    def fail():
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError):
        train(loaders={"train": loader(16, 4)}, num_epochs=2, logdir=tmp_path / "run", callbacks=[At(fail, step=6)])
    status = json.loads((tmp_path / "run" / FILE).read_text())
    shown = output(capsys, "metrics", tmp_path / "run")
    findings = output(capsys, "doctor", tmp_path / "run")["findings"]

    assert shown["status"] == status == output(capsys, "watch", tmp_path / "run")
    assert {"verdict": "good", "path": FILE, "text": "can be read"} in findings
    for command in ("metrics", "watch"):
        assert main([command, str(tmp_path / "run")]) == 0
        assert "failed: RuntimeError: broken" in " ".join(capsys.readouterr().out.split())


def test_watch_prints_each_change_until_the_end(tmp_path, capsys):
    """A run that is watched by its own callback is running; the last line has how it ended."""
    states = []

    def look():
        assert main(["watch", str(tmp_path / "run"), "--once", "--json"]) == 0
        states.append(json.loads(capsys.readouterr().out)["state"])

    train(logdir=tmp_path / "run", callbacks=[At(look, step=2)])

    assert states == ["running"]
    assert output(capsys, "watch", tmp_path / "run")["state"] == "finished"
    assert run_status.EVERY_S > 0


def test_watch_ends_when_a_run_of_another_machine_is_unknown(tmp_path, capsys, monkeypatch):
    """A run that was killed there never writes how it ended."""
    train(logdir=tmp_path / "run")
    path = tmp_path / "run" / FILE
    before = {"state": "running", "host": "elsewhere", "updated_at": "2026-01-01T00:00:00+00:00"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **before}))
    monkeypatch.setattr(status_stream, "time", Mock(wraps=time, sleep=lambda _: pytest.fail("watch waits")))

    assert output(capsys, "watch", tmp_path / "run")["state"] == "unknown"


@pytest.mark.parametrize("make", [False, True], ids=["no folder", "no status"])
def test_watch_without_a_status_says_so(tmp_path, capsys, make):
    if make:
        (tmp_path / "run").mkdir()

    assert main(["watch", str(tmp_path / "run"), "--json"]) == 2
    assert f"does not contain {FILE}" in capsys.readouterr().err


def test_doctor_lists_findings(tmp_path, capsys):
    """The exit code is as without --json."""
    train(logdir=tmp_path / "run")
    assert output(capsys, "doctor", tmp_path / "run")["num_broken"] == 0

    (tmp_path / "run" / "checkpoints" / "last.pth").unlink()
    (tmp_path / "run" / "checkpoints" / "model.0001.pth").write_bytes(b"")
    shown = output(capsys, "doctor", tmp_path / "run", code=1)

    assert shown["num_broken"] == len([each for each in shown["findings"] if each["verdict"] == "BROKEN"]) > 0


def test_run_and_export_name_what_they_wrote(tmp_path, monkeypatch, capsys):
    """A config's run prints its logdir and last metrics, and what is made of the run its path."""
    monkeypatch.chdir(tmp_path)
    Path("linear.yaml").write_text(CONFIG)

    ran = output(capsys, "run", "linear.yaml", "--logdir", "logs/one", "num_epochs=2")
    table = read_metrics("logs/one")
    last = table[(table["epoch"] == 2) & (table["loader"] == "valid") & (table["metric"] == "loss")]["value"].item()
    made = [
        output(capsys, "export", "logs/one", "--to", "safetensors"),
        output(capsys, "plot", "logs/one"),
        output(capsys, "report", "logs/one", "-o", "page.html"),
    ]

    assert (ran["logdir"], ran["metrics"]["valid"]["loss"]) == ("logs/one", last)
    assert [Path(each["path"]).name for each in made] == ["model.safetensors", "metrics.png", "page.html"]
    assert all(Path(each["path"]).is_file() for each in made)


def test_a_script_prints_its_own_output(tmp_path, capsys):
    (tmp_path / "train.py").touch()

    assert main(["run", str(tmp_path / "train.py"), "--json"]) == 2
    assert "status.json" in capsys.readouterr().err


def test_tune_prints_the_best_trial(tmp_path, monkeypatch, capsys):
    pytest.importorskip("optuna")
    monkeypatch.chdir(tmp_path)
    Path("linear.yaml").write_text(CONFIG)

    best = output(capsys, "tune", "linear.yaml", "--trials", 2, "optimizer.lr=0.01,0.1")

    assert best["values"].keys() == {"optimizer.lr"} and Path(best["config"]).is_file()


def test_a_copy_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RUNNERKIT_STAGING", str(tmp_path / "staging"))
    train(logdir="memory://runs/mine")

    assert output(capsys, "fetch", "memory://runs/mine", tmp_path / "here") == {"path": str(tmp_path / "here")}
    assert json.loads((tmp_path / "here" / FILE).read_text())["state"] == "finished"


def test_env_is_one_line_or_several(capsys):
    """With --json it is one line; it is JSON anyway."""
    shown = output(capsys, "env")

    assert main(["env"]) == 0
    assert json.loads(re.sub(r"\s+", " ", capsys.readouterr().out)).keys() == shown.keys()
