"""Tests of the commands that read logs: `runnerkit metrics`, `plot`, `watch` and `report`."""

import html
import io
import math
import os
import re
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest
from matplotlib.image import imread

from runnerkit import read_metrics
from runnerkit.commands.cli import main
from runnerkit.history.best_values import compare_runs
from runnerkit.history.plot import plot_metrics
from tests.runs import fail_run, judge_run, log_run

CURVES = {
    "train": {"loss": [0.9, 0.5, 1 / 3], "lr": [0.1, 0.1, 0.05]},
    "valid": {"loss": [0.8, 0.7, 0.75], "accuracy": [0.5, 0.75, 0.6]},
}


@pytest.fixture
def logs(tmp_path):
    """Return a folder with two runs, of which the second is better."""
    log_run(tmp_path / "logs" / "first", CURVES)
    log_run(tmp_path / "logs" / "second", {**CURVES, "valid": {"loss": [0.7, 0.6, 0.5], "accuracy": [0.6, 0.7, 0.8]}})
    return tmp_path / "logs"


@pytest.fixture
def command(capsys):
    """Return a function that runs the command and returns (exit code, standard output, standard error)."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_one_run_is_printed_pass_by_pass_with_its_best_epochs(logs, command):
    """One run is printed in chronological order, with blanks for missing values, and then its best epochs."""
    judge_run(logs / "first", "valid", "accuracy", minimize=False)

    code, out, _ = command("metrics", logs / "first")

    passes, best = out.removeprefix("first\n\n").split("\n\n")
    assert code == 0
    assert [line.split() for line in passes.splitlines()] == [
        ["stage", "epoch", "step", "loader", "loss", "lr", "accuracy"],
        ["train", "1", "10", "train", "0.9", "0.1"],
        ["train", "1", "10", "valid", "0.8", "0.5"],
        ["train", "2", "20", "train", "0.5", "0.1"],
        ["train", "2", "20", "valid", "0.7", "0.75"],
        ["train", "3", "30", "train", "0.3333", "0.05"],
        ["train", "3", "30", "valid", "0.75", "0.6"],
    ]
    lines = [line.split() for line in best.splitlines()]
    assert lines[0][:6] == ["loader", "metric", "better", "best", "best_epoch", "last"]
    assert ["train", "lr", "0.05", "0.05", "3", "0.1", "1"] in lines  # without a direction
    assert ["valid", "loss", "smaller", "0.7", "2", "0.75", "0.7", "2", "0.8", "1"] in lines
    assert ["valid", "accuracy", "larger", "0.75", "2", "0.6", "0.5", "1", "0.75", "2"] in lines


def test_best_epochs_of_several_stages_have_the_stage(tmp_path, command):
    """Each stage of a run has its own best epoch of a metric."""
    (tmp_path / "csv").mkdir()
    rows = ["pretrain,1,3,0.5", "pretrain,2,6,0.4", "train,3,9,0.9", "train,4,12,0.8"]
    (tmp_path / "csv" / "valid.csv").write_text("\n".join(["stage,epoch,step,loss", *rows, ""]))

    code, out, _ = command("metrics", tmp_path)

    lines = [line.split()[:6] for line in out.split("\n\n")[2].splitlines()]
    assert code == 0 and lines == [
        ["stage", "loader", "metric", "better", "best", "best_epoch"],
        ["pretrain", "valid", "loss", "smaller", "0.4", "2"],
        ["train", "valid", "loss", "smaller", "0.8", "4"],
    ]


def test_all_metrics_of_a_run_of_constants_are_drawn(tmp_path, command):
    """`plot --all` draws them although it leaves constants out, and tells a wrong name by name."""
    log_run(tmp_path, {"valid": {"loss": [math.nan, math.nan]}})

    assert command("plot", tmp_path, "--all")[:2] == (0, f"{tmp_path}/metrics.png\n")
    with pytest.raises(KeyError, match=r"got no metrics; choose from \['loss'\]"):
        plot_metrics(tmp_path, metrics=[])


def test_several_runs_are_a_row_each_the_best_first(logs, command):
    """Several runs are sorted by the valid loss by default, the best first."""
    code, out, _ = command("metrics", logs)

    assert code == 0
    assert [line.split() for line in out.splitlines()] == [
        ["loss", "of", "valid,", "smaller", "is", "better"],
        [],
        ["run", "best", "best_epoch", "last"],
        ["second", "0.5", "3", "0.5"],
        ["first", "0.7", "2", "0.75"],
    ]


@pytest.fixture
def with_failed_runs(logs):
    """Return a folder of four runs: one failed after three epochs, one within its first, and one before it."""
    for run in ("first", "third", "fourth"):
        fail_run(logs / run, f"boom <{run}>")
    (logs / "third" / "csv").mkdir()
    (logs / "third" / "csv" / "train.csv").write_text("stage,epoch,step\n")
    return logs


FAILED = ["first: failed: ", "fourth: nothing is logged, failed: ", "third: nothing is logged, failed: "]


@pytest.mark.parametrize("arguments", [["metrics"], ["watch", "--once"], ["report"]], ids=lambda words: words[0])
def test_runs_that_failed_are_named_below_the_numbers(with_failed_runs, command, arguments):
    """Also those without numbers, so that a sweep of four shows four."""
    code, out, _ = command(arguments[0], with_failed_runs, *arguments[1:])

    text = out if arguments != ["report"] else html.unescape((with_failed_runs / "report.html").read_text())
    assert code == 0
    words = [f"{begin}ValueError: boom <{begin.partition(':')[0]}>" for begin in FAILED]
    assert [each for each in words if each not in text] == []
    assert "second: " not in out


def test_a_run_that_failed_before_its_first_numbers_says_why(with_failed_runs, command):
    """The state is in the message, or instead of waiting."""
    code, _, err = command("metrics", with_failed_runs / "fourth")
    waited, out, _ = command("watch", with_failed_runs / "third", "--once")

    assert code == 2 and err.endswith("; fourth: failed: ValueError: boom <fourth>\n")
    words = " ".join(out.partition(": ")[2].split())
    assert waited == 0 and words == "nothing is logged, failed: ValueError: boom <third>"


def test_without_a_direction_both_ends_are_shown(logs, command):
    """If no checkpoint defines a metric's direction, its smallest and largest values are shown."""
    _, out, _ = command("metrics", logs / "second", logs / "first", "--metric", "accuracy")

    assert [line.split() for line in out.splitlines()] == [
        ["accuracy", "of", "valid"],
        [],
        ["run", "last", "smallest", "smallest_epoch", "largest", "largest_epoch"],
        ["second", "0.8", "0.6", "1", "0.8", "3"],
        ["first", "0.6", "0.5", "1", "0.75", "2"],
    ]


def test_csv_has_all_digits(logs, command):
    """`--csv` prints exact floats for one run and for several."""
    _, one, _ = command("metrics", logs / "first", "--csv", "--loader", "train")
    _, several, _ = command("metrics", logs, "--csv", "--metric", "loss", "--loader", "train")

    table = pd.read_csv(io.StringIO(one))
    logged = read_metrics(logs / "first").query("loader == 'train' and metric == 'loss'")["value"]
    assert table["loss"].tolist() == logged.tolist() == [0.9, 0.5, 1 / 3]
    assert list(table) == ["stage", "epoch", "step", "loader", "loss", "lr"]
    compared = pd.read_csv(io.StringIO(several))
    expected = compare_runs(logs, metric="loss", loader="train")
    assert list(compared) == list(expected)
    assert compared["best"].tolist() == expected["best"].tolist() == [1 / 3, 1 / 3]


def test_plot_draws_several_runs_where_it_is_told(logs, command, tmp_path, monkeypatch):
    """`plot -o` draws several runs, creates the folder if necessary and prints the path."""
    monkeypatch.chdir(tmp_path)

    code, out, _ = command(
        "plot", "logs/first", "logs/second", "-o", "new/curves.png", "--metric", "loss", "--log", "loss"
    )

    assert (code, out) == (0, "new/curves.png\n")
    assert imread("new/curves.png").shape[0] > 200


def test_watch_draws_once_where_there_is_no_terminal(logs, command):
    """Without a terminal, as in a pipe, `watch` prints the curves once."""
    code, out, _ = command("watch", logs / "first", "--metric", "loss", "--loader", "valid")

    assert code == 0 and "loss  valid 0.75" in out and "train" not in out


def test_commands_of_the_page_run(command, tmp_path, monkeypatch):
    """The commands of docs/curves.md run on the runs that its first block trains."""
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[1] / "docs" / "curves.md").read_text()
    exec(re.search(r"^```python\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1], {})
    lines = re.search(r"^```sh\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)[1].splitlines()

    codes = {line: command(*shlex.split(line)[1:])[0] for line in lines}

    assert len(codes) == 6 and set(codes.values()) == {0}
    assert all(map(Path.is_file, map(Path, ("curves.png", "logs/lr=0.1/report.html", "logs/report.html"))))


LOSSY = "metrics ['lossy'] were not logged; choose from ['loss', 'lr', 'accuracy']"
NO_LOGS = "no logs of scope 'loader' in empty: expected csv/<loader>.csv or metrics.jsonl"
WRONG = {
    "metrics nowhere": "nowhere: no such folder",
    "metrics empty": NO_LOGS,
    "metrics file": "file: a file: pass the logdir",
    "metrics logs/first --metric lossy": LOSSY,
    "metrics logs --loader vaild": "loaders ['vaild'] were not logged; choose from ['train', 'valid']",
    "metrics logs/first --metric lr --loader valid": "metrics ['lr'] were not logged by ['valid']; choose from",
    "plot logs/first --metric loss --metric lossy": LOSSY,
    "plot logs/first logs/second": "got 2 folders: choose the output file with path= or -o",
    "plot logs/first -o file/curves.png": "cannot write file/curves.png: folder file cannot be created: ",
    "plot logs/first -o new/curves.xyz": "cannot write new/curves.xyz: unknown format 'xyz'; expected one of ",
    "plot logs/first -o .": "cannot write .: it is a folder; name a file in it",
    "plot logs/first -o /proc/x.png": "cannot write /proc/x.png: No such file or directory",
    "plot logs/first --metric accuracy --log loss": "cannot use a logarithmic axis for ['loss'], which is not drawn",
    "watch empty --once": NO_LOGS,
    "watch logs/first --metric lossy": LOSSY,
    "report nowhere": "nowhere: no such folder",
    "report logs/first logs/second": "got 2 folders: choose the output file with path= or -o",
    "plot logs --all --metric loss": "pass either --all or --metric",
    "report logs/first -o file/page.html": "cannot write file/page.html: folder file cannot be created: ",
    "report logs/first -o .": "cannot write .: it is a folder; name a file in it",
    "report logs/first -o /proc/x.html": "cannot write /proc/x.html: No such file or directory",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_uses_are_told_in_one_line(words, logs, command, monkeypatch):
    """Wrong arguments give one line on standard error and exit code 2, and no file is written."""
    monkeypatch.chdir(logs.parent)
    Path("empty").mkdir()
    Path("file").touch()
    before = sorted(Path.cwd().rglob("*"))

    code, out, err = command(*words.split())

    assert (code, out) == (2, "")
    assert err.startswith(f"runnerkit {words.split()[0]}: {WRONG[words]}")
    assert len(err.splitlines()) == 1
    assert sorted(Path.cwd().rglob("*")) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_to_is_named(logs, command):
    """A folder without write permission is named in the error."""
    (logs / "first").chmod(0o500)

    code, _, err = command("report", logs / "first")

    (logs / "first").chmod(0o700)
    assert code == 2 and "report.html" in err and "Permission denied" in err


def test_missing_pandas_is_named_once(logs, command, monkeypatch):
    """Without pandas, the command prints the install command instead of a traceback."""
    monkeypatch.setitem(sys.modules, "pandas", None)

    code, _, err = command("metrics", logs)

    assert code == 2 and "pip install runnerkit[metrics]" in err
