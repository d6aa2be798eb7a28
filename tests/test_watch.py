"""Tests of watch, which draws the curves of a running run in a terminal."""

import math
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from runnerkit.commands.watch import watch
from tests.runs import log_run

ROOT = Path(__file__).parents[1]
CURVES = {
    "train": {"loss": [0.9, 0.5, 0.25], "lr": [0.1, 0.1, 0.05]},
    "valid": {"loss": [0.8, 0.7, 0.6], "accuracy": [0.5, 0.75, 0.625]},
}


def drawn(logdir, *, width=80, height=24, **options):
    console = Console(width=width, height=height, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        watch(logdir, console=console, **options)
    return console.export_text()


def test_last_values_and_axes_are_those_logged(tmp_path):
    """A plot shows the metric's name, each loader's last value, the limits of the values and the epochs."""
    log_run(tmp_path / "digits", CURVES)

    lines = drawn(tmp_path / "digits", metrics=["loss"]).splitlines()

    assert lines[0].split() == ["digits", "epoch", "3,", "step", "30"]
    assert lines[1].split() == ["loss", "train", "0.25", "valid", "0.6"]
    assert lines[2].startswith(" 0.9 ")
    assert [line.split()[0] for line in lines if line.startswith("0.25 ")] == ["0.25"]
    assert lines[-2].split() == ["1", "epoch", "3"]


def test_the_curve_falls_as_the_loss_does(tmp_path):
    """A falling curve starts in the upper left corner and ends in the lower right one."""
    log_run(tmp_path / "digits", {"train": {"loss": [3.0, 2.0, 1.0]}})

    lines = drawn(tmp_path / "digits", width=40).splitlines()[2:-2]

    curve = [line[2:].ljust(36) for line in lines]
    assert curve[0][0] not in " \u2800" and curve[-1].rstrip(" \u2800") != ""
    assert curve[0][-1] in " \u2800" and curve[-1][0] in " \u2800"


def test_metrics_have_colors_by_loader(tmp_path):
    """A loader's name and its curve have the same color, which differs between loaders."""
    log_run(tmp_path / "digits", CURVES)
    console = Console(width=80, force_terminal=True, color_system="standard", record=True, file=open(os.devnull, "w"))  # noqa: SIM115

    with console.file:
        watch(tmp_path / "digits", metrics=["loss"], once=True, console=console)

    text = console.export_text(styles=True)
    colors = re.findall(r"\x1b\[(\d+)m  (?:train 0.25|valid 0.6)\b", text)
    assert len(set(colors)) == 2
    assert all(re.search(rf"\x1b\[{color}m[\u2801-\u28ff]", text) for color in colors)


@pytest.mark.parametrize(("width", "height", "shown"), [(80, 24, 3), (40, 24, 2), (40, 12, 1)])
def test_as_many_metrics_as_there_is_room_for(tmp_path, width, height, shown):
    """As many metrics as fit are drawn and the others are named; requested metrics are all drawn."""
    log_run(tmp_path / "digits", CURVES)
    names = ["loss", "accuracy", "lr"]  # what evaluation loaders log comes first

    text = drawn(tmp_path / "digits", width=width, height=height)

    assert [name for name in names if re.search(rf"{name}  \w+ 0\.", text)] == names[:shown]
    assert ("also logged" in text) == (shown < 3)
    assert all(name in text for name in names)
    assert len(text.splitlines()) <= height
    assert max(map(len, text.splitlines())) <= width
    asked = drawn(tmp_path / "digits", width=width, height=height, metrics=names)
    assert all(re.search(rf"{name}  \w+ 0\.", asked) for name in names)


def test_a_diverged_run_is_drawn(tmp_path):
    """Non-finite values leave gaps, and a metric without finite values gets a message instead of a curve."""
    log_run(tmp_path / "run", {"train": {"loss": [1.0, math.nan, math.inf], "lost": [math.nan] * 3}})

    text = drawn(tmp_path / "run")

    assert "loss  train inf" in text and "lost  train nan" in text
    assert "no finite number to draw" in text


def test_a_run_that_has_not_logged_yet_is_waited_for_and_what_is_no_run_is_refused(tmp_path):
    """An empty log folder is waited for; a folder without one and unknown metrics are refused."""
    (tmp_path / "run" / "csv").mkdir(parents=True)

    assert drawn(tmp_path / "run", width=200).strip() == f"{tmp_path / 'run'}: nothing is logged yet"
    for name in ("", "nowhere"):
        with pytest.raises(FileNotFoundError, match=str(tmp_path / name)):
            drawn(tmp_path / name)
    log_run(tmp_path / "runs" / "a", CURVES)
    with pytest.raises(KeyError, match=r"'lossy'.*'loss', 'lr', 'accuracy'"):
        drawn(tmp_path / "runs" / "a", metrics=["lossy"])


def test_several_runs_are_drawn_over_one_another(tmp_path):
    """By one loader, with a table below: the runs, the best first, what differs, best, epoch and last value."""
    losses = {"a": [3.0, 2.0, 1.0], "b": [1.0, 0.5, 0.75]}
    for run, values in losses.items():
        log_run(tmp_path / run, {"train": {"loss": [9.0, 9.0, 8.0]}, "valid": {"loss": values}})
        (tmp_path / run / "hparams.yml").write_text(f"lr: {0.1 if run == 'a' else 0.02}\nwidth: 16\n")

    lines = drawn(tmp_path).splitlines()

    assert lines[0].split() == ["2", "runs,", "valid", "epoch", "3,", "step", "30"]
    assert lines[1].split() == ["loss"]
    assert lines[2].split()[0] == "3" and any(line.startswith("0.5 ") for line in lines)
    assert [line.split() for line in lines[-3:]] == [
        ["run", "lr", "best", "loss", "epoch", "last"],
        ["b", "0.02", "0.5", "2", "0.75"],
        ["a", "0.1", "1", "3", "1"],
    ]
    assert "valid" not in drawn(tmp_path, loaders=["train"])


def test_several_runs_are_drawn_by_the_loader_of_a_metric(tmp_path):
    """A learning rate is logged in training only."""
    for run in ("a", "b"):
        log_run(tmp_path / run, CURVES)

    assert drawn(tmp_path, metrics=["lr"]).split()[:3] == ["2", "runs,", "train"]
    assert drawn(tmp_path, metrics=["loss", "lr"]).split()[:5] == ["2", "runs,", "valid", "and", "train"]


def test_several_runs_are_compared_by_a_loader_that_logged_the_metric(tmp_path):
    """The first loader that is named may not have it."""
    for run, values in {"a": [0.5, 0.6], "b": [0.5, 0.9]}.items():
        log_run(tmp_path / run, {"train": {"loss": [3.0, 2.0]}, "valid": {"loss": [3.0, 2.0], "accuracy": values}})

    lines = drawn(tmp_path, loaders=["train", "valid"], metrics=["accuracy"]).splitlines()

    assert lines[-3].split() == ["run", "last"]
    assert [line.split() for line in lines[-2:]] == [["a", "0.6"], ["b", "0.9"]]


@pytest.mark.parametrize("runs", [["a"], ["a", "b"]], ids=len)
def test_tables_without_rows_are_waited_for_or_refused(tmp_path, runs):
    """A power loss may have left the head of a file only."""
    for run in runs:
        log_run(tmp_path / run, CURVES)
        for table in (tmp_path / run / "csv").glob("*.csv"):
            table.write_text(table.read_text().splitlines()[0] + "\n")

    if len(runs) == 1:
        assert "nothing is logged yet" in drawn(tmp_path / "a", width=200)
    else:
        with pytest.raises(FileNotFoundError, match="lack rows"):
            drawn(tmp_path)


def test_a_damaged_environment_does_not_hide_the_curves(tmp_path):
    """It only tells what is monitored."""
    log_run(tmp_path / "run", CURVES)
    (tmp_path / "run" / "environment.json").write_text('{"settings": ')

    assert "loss  train 0.25  valid 0.6" in drawn(tmp_path / "run")


def test_a_wide_comparison_stays_within_the_terminal(tmp_path):
    """As many runs as there is room for are listed."""
    for number in range(15):
        log_run(tmp_path / f"run{number}", {"valid": {"loss": [1.0, 1 / (number + 2)]}})
        (tmp_path / f"run{number}" / "hparams.yml").write_text(f"lr: {number}\n")

    text = drawn(tmp_path, width=60, height=40)

    assert max(map(len, text.splitlines())) <= 60
    assert text.count("run") >= 12 and len(text.splitlines()) <= 40


def test_missing_rich_names_the_install_command(tmp_path, monkeypatch):
    """Without rich, the error names the extra to install."""
    monkeypatch.setitem(sys.modules, "rich.live", None)

    with pytest.raises(ImportError, match=r"pip install runnerkit\[rich\]"):
        watch(tmp_path)


def test_in_a_terminal_it_follows_the_run_until_interrupted(tmp_path):
    """In a terminal, new values appear until Ctrl-C, which prints no traceback."""
    log_run(tmp_path / "run", {"train": {"loss": [0.9]}})
    master, slave = pty.openpty()
    script = f"from runnerkit.commands.watch import watch; watch({str(tmp_path / 'run')!r}, every_s=0.2)"
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=slave, stderr=slave, env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "80"},
    )  # fmt: skip
    os.close(slave)

    before = read_until(master, "loss  train 0.9")
    with (tmp_path / "run" / "csv" / "train.csv").open("a") as file:
        file.write("train,2,20,0.375\n")
    after = read_until(master, "0.375")
    process.send_signal(signal.SIGINT)

    assert "epoch 1, step 10" in before and "epoch 2, step 20" in after
    assert process.wait(timeout=20) == 0
    assert "Traceback" not in read_until(master, None)
    os.close(master)


def read_until(terminal, wanted, *, timeout_s=60):
    """Read the terminal's text, without escape sequences, until `wanted` or to the end."""
    shown, deadline = "", time.monotonic() + timeout_s
    while wanted is None or wanted not in shown:
        assert time.monotonic() < deadline, shown
        if select.select([terminal], [], [], 1)[0]:
            try:
                text = os.read(terminal, 65536).decode(errors="ignore")
            except OSError:  # the other side is closed
                break
            shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    return shown
