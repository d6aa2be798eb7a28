"""Tests of the page that compares several runs."""

import json
import shutil
import subprocess

import pytest
import yaml

from runnerkit.history.best_values import compare_runs
from runnerkit.history.report import write_report
from tests.runs import judge_run, log_run
from tests.test_report import Page, svg_of

LR = {"a": 0.1, "b": 0.02, "c": 0.003}
LOSSES = {"a": [3.0, 1.0], "b": [2.0, 0.5], "c": [4.0, 2.0]}
DIFF = "diff --git a/train.py b/train.py\n-lr = 1 < 2\n+lr = 2"


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    for run, lr in LR.items():
        curves = {"train": {"loss": LOSSES[run], "lr": [lr, lr]}, "valid": {"loss": LOSSES[run], "auc": [0.5, lr]}}
        log_run(folder / run, curves)
        judge_run(folder / run, "valid", "auc", minimize=False)
        hparams = {"lr": lr, "note": f"<b>{run}</b>", "width": 16, "api_key": f"secret-{run}"}
        (folder / run / "hparams.yml").write_text(yaml.safe_dump(hparams, sort_keys=False))
        git = {"commit": "1" * 40 if run != "c" else "2" * 40, "branch": "main", "has_changes": run != "c"}
        environment = {
            "versions": {"torch": "2.13" if run == "a" else "2.14"},
            "git": git | ({"diff": DIFF} if run != "c" else {}),
            "command": ["train.py", f"--lr={lr}", "--api-key", "secret-word"], "seed": 42,
            "settings": {"optimizer": {"name": "SGD", "lr": lr}, "batch_size": {"train": 4 if run == "a" else 8}},
        }  # fmt: skip
        (folder / run / "environment.json").write_text(json.dumps(environment))
    return folder


@pytest.fixture(scope="module")
def html(sweep):
    return write_report(sweep).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_the_table_has_what_differs_and_the_values_of_compare_runs(sweep, page):
    """The best run first; a row's settings, best, epoch and last value are its run's."""
    header, *rows = page.tables["runs"]

    assert header[:7] == ["run", "lr", "note", "batch_size.train", "best", "best epoch", "last"]
    sizes = {"a": 4, "b": 8, "c": 8}
    expected = [
        [run, LR[run], f"<b>{run}</b>", sizes[run], row["best"], row["best_epoch"], row["last"]]
        for run, row in compare_runs(sweep).set_index("run").iterrows()
    ]
    assert [row[:7] for row in rows] == expected
    assert [row[0] for row in rows] == ["a", "b", "c"]
    assert header[7:] == ["loss (train)", "loss (valid)"]
    assert {row[0]: row[8] for row in rows} == {run: losses[-1] for run, losses in LOSSES.items()}


def test_the_page_is_in_the_folder_of_the_runs_and_needs_no_other_file(sweep, html, page):
    """All links are pictures within it; its script sorts the table and loads nothing."""
    assert (sweep / "report.html").is_file()
    assert all(link.startswith("data:image/svg+xml;base64,") for link in page.links)
    assert page.scripts == 1 and "src=" not in html[html.index("<script") :]
    assert "fetch(" not in html and "import(" not in html and "http" not in html.replace("http-equiv", "")


def test_curves_of_all_runs_are_over_one_another(page):
    """The losses and the monitored metric have a picture each, with a curve for each run and loader."""
    pictures = {each["alt"]: svg_of(each["src"]) for each in page.images}

    assert list(pictures) == ["curves of loss", "curves of auc"]
    assert pictures["curves of loss"].count("<use xlink:href") > pictures["curves of auc"].count("<use xlink:href")


def test_values_are_escaped_and_credentials_hidden(html, page):
    """Also those of files that earlier versions wrote."""
    assert "<b>a</b>" not in html and "&lt;b&gt;a&lt;/b&gt;" in html
    assert "lr = 1 < 2" not in html and "lr = 1 &lt; 2" in html
    assert "secret-" not in html
    assert "--api-key ***" in dict(page.tables["commands"])["a"]


def test_code_and_environment_are_shown_once(html, page):
    """Runs of one commit with one diff are named together; versions that differ are a table, equal ones another."""
    assert html.count("lr = 1 &lt; 2") == 1
    assert f"a, b:\ncommit {'1' * 40}" in page.text and f"c:\ncommit {'2' * 40}" in page.text
    assert page.tables["differences"] == [["", "a", "b", "c"], ["versions.torch", "2.13", "2.14", "2.14"]]
    same = dict(page.tables["same"])
    assert same["width"] == "16" and same["optimizer.name"] == "SGD"
    assert dict(page.tables["environment"])["seed"] == "42"


def test_changes_that_were_not_saved_are_not_those_of_a_clean_run(tmp_path):
    """With save_diff=False, or if git took too long, only `has_changes` tells runs of one commit apart."""
    told = {"a": False, "b": True, "c": None}
    for run, has_changes in told.items():
        log_run(tmp_path / run, {"valid": {"loss": [1.0, 0.5]}})
        git = {"commit": "1" * 40, "branch": "main", "has_changes": has_changes}
        (tmp_path / run / "environment.json").write_text(json.dumps({"git": git}))

    text = " ".join(Page(write_report(tmp_path).read_text()).text.split())

    for run, words in {"a": "without", "b": "with uncommitted", "c": "perhaps with uncommitted"}.items():
        assert f"{run}: commit {'1' * 40} of main, {words} changes" in text


def test_runs_without_settings_are_compared(tmp_path):
    """Logs alone are enough; a run that lacks the compared metric has empty cells."""
    log_run(tmp_path / "a", {"valid": {"loss": [1.0, 0.5]}})
    log_run(tmp_path / "b", {"train": {"norm": [1.0, 2.0]}})

    page = Page(write_report([tmp_path / "a", tmp_path / "b"], path=tmp_path / "page.html").read_text())

    rows = {row[0]: row[1:] for row in page.rows("runs")}
    assert rows["a"][:3] == [0.5, 2, 0.5] and rows["b"][:3] == ["", "", ""]
    assert "no commit is known" in page.text


def title_of(html, script, folder):
    """Return the title that a script gives the page in a browser."""
    (folder / "page.html").write_text(html.replace("</body>", f"<script>{script}</script></body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,1000", "--dump-dom"]
    command = ["chromium", *options, f"--user-data-dir={folder / 'profile'}", (folder / "page.html").as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.partition("<title>")[2].partition("</title>")[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_a_click_sorts_the_table(html, tmp_path):
    """In a browser: by a number, not by its text, ascending and then descending."""
    clicks = "const lr = document.querySelectorAll('#runs button')[1]; lr.click(); const order = () => "
    clicks += "[...document.querySelectorAll('#runs tbody tr')].map((row) => row.cells[0].textContent).join('');"
    clicks += "const up = order(); lr.click(); document.title = up + ' ' + order();"

    assert title_of(html, clicks, tmp_path) == "cba abc"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs Chromium")
def test_names_of_runs_are_whole_and_the_table_fits(tmp_path):
    """In a window of 1400 pixels: a name has one line, and a table with eleven columns does not scroll."""
    for lr in (0.01, 0.003):
        metrics = {name: [0.98765, 0.12345] for name in ("loss", "accuracy", "accuracy03", "auc")}
        log_run(tmp_path / f"lr={lr}_hidden=128", {"train": metrics, "valid": metrics})
        (tmp_path / f"lr={lr}_hidden=128" / "hparams.yml").write_text(f"lr: {lr}")
    measured = "const name = document.querySelector('#runs tbody td'), wide = document.querySelector('.wide');"
    measured += "document.title = (name.clientHeight < 35) + ' ' + (wide.scrollWidth <= wide.clientWidth);"

    assert title_of(write_report(tmp_path).read_text(encoding="utf-8"), measured, tmp_path) == "true true"
