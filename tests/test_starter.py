"""Tests of `runnerkit new`, whose script and project run without changes."""

import ast
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from runnerkit import read_metrics
from runnerkit.commands.cli import main
from runnerkit.commands.project_template import FILES

ROOT = Path(__file__).parents[1]


def test_the_script_trains(tmp_path, monkeypatch, capsys):
    """The script runs in an empty folder, learns three classes and writes logs under its name."""
    monkeypatch.chdir(tmp_path)

    assert main(["new", "first.py"]) == 0
    runpy.run_path("first.py", run_name="__main__")

    metrics = read_metrics("logs/first")
    accuracy = metrics[(metrics["loader"] == "valid") & (metrics["metric"] == "accuracy")]["value"].iloc[-1]
    assert accuracy > 0.9
    assert capsys.readouterr().out.endswith(f"accuracy {accuracy}\n")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("there.py", "there.py exists already: choose another name"),
        ("train.txt", "train.txt must end in .py"),
        ("there.py/train.py", "cannot write there.py/train.py (File exists)"),
        ("there.py/project", "cannot write there.py/project/README.md (Not a directory)"),
        (".", "exists already: choose another name"),
        ("torch.py", "torch.py would hide the module torch"),
        ("folder/random.py", "would hide the module random"),
        ('a"b.py', "without quotes"),
        ('say"""', "without quotes"),
        ("back\\", "backslashes"),
        ("s3://bucket/project", "s3://bucket/project is the URL of a store"),
    ],
)
def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys, path, words):
    """An existing file and an invalid path give an error, and no file is written."""
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("mine")

    assert main(["new", path]) == 2
    assert words in capsys.readouterr().err
    assert Path("there.py").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["my train.py", "it's.py", "class.py", "émigré-2.py"])
def test_a_script_of_any_name_can_be_read(tmp_path, monkeypatch, name):
    """Python can, and so can a shell its commands."""
    monkeypatch.chdir(tmp_path)

    assert main(["new", name]) == 0

    text = Path(name).read_text(encoding="utf-8")
    documented = (ast.get_docstring(ast.parse(text)) or "").splitlines()[2:]
    assert [shlex.split(each)[:3] for each in documented] == [["python", name], ["runnerkit", "run", name]]
    assert f"logs/{name.removesuffix('.py')}" in text


def test_a_project_has_its_name(tmp_path, monkeypatch, capsys):
    """The files of the project are listed, and name it."""
    monkeypatch.chdir(tmp_path)
    Path("digits").mkdir()

    assert main(["new", "digits"]) == 0

    assert capsys.readouterr().out.split() == [f"digits/{name}" for name in FILES]
    texts = {name: Path("digits", name).read_text() for name in FILES}
    assert "# digits" in texts["README.md"] and not any("@" in text for text in texts.values())


def test_the_config_of_a_project_says_where_it_runs(tmp_path, monkeypatch, capsys):
    """Modules of a config are imported from the current folder."""
    monkeypatch.chdir(tmp_path)
    main(["new", "digits"])

    assert main(["run", "digits/config.yaml"]) == 2
    assert "cannot import 'task." in (err := capsys.readouterr().err)
    assert err.endswith("; task.py is beside the config: start the command in digits\n")


@pytest.mark.slow
def test_the_project_trains_and_its_tests_pass(tmp_path):
    """The config, the script and the tests of a new project run without changes, with equal metrics."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}

    def run(*arguments, folder):
        command = [sys.executable, "-m", *arguments]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("runnerkit", "new", "digits", folder=tmp_path)
    folder = tmp_path / "digits"
    run("runnerkit", "run", "config.yaml", "--logdir", "logs/first", folder=folder)
    script = [sys.executable, "train.py"]
    subprocess.run(script, cwd=folder, env=environment, capture_output=True, check=True)
    tested = run("pytest", "-q", "-p", "no:cacheprovider", folder=folder)

    first, second = (read_metrics(folder / "logs" / name).drop(columns="run") for name in ("first", "script"))
    assert "3 passed" in tested
    assert first.equals(second)
    accuracy = first[(first["loader"] == "valid") & (first["metric"] == "accuracy")]["value"].iloc[-1]
    assert accuracy > 0.9
