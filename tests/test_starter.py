"""Tests of `runnerkit new`, whose script runs without changes."""

import runpy
from pathlib import Path

import pytest

from runnerkit import read_metrics
from runnerkit.commands.cli import main


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
    ],
)
def test_nothing_is_overwritten(tmp_path, monkeypatch, capsys, path, words):
    """An existing file and an invalid path give an error, and no file is written."""
    monkeypatch.chdir(tmp_path)
    Path("there.py").write_text("mine")

    assert main(["new", path]) == 2
    assert words in capsys.readouterr().err
    assert Path("there.py").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1
