"""Tests of write_report, which writes a run's report as one self-contained page."""

import base64
import json
import math
import re
from html.parser import HTMLParser

import pandas
import pytest
import yaml

from runnerkit import dl, read_metrics
from runnerkit.checkpoints.index import read_index
from runnerkit.history.best_values import best_metrics
from runnerkit.history.report import write_report
from tests.runs import log_run
from tests.tiny import loader, train


class Page(HTMLParser):
    """Parsed page: tables with cells as numbers or text, links, the number of scripts, and the text."""

    def __init__(self, html):
        super().__init__()
        self.tables, self.links, self.images, self.scripts, self.text = {}, [], [], 0, ""
        self._rows = self._cell = self._value = None
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.links += [attributes[name] for name in ("src", "href", "action", "data", "srcset") if name in attributes]
        self.scripts += tag in ("script", "link", "iframe", "object")
        if tag == "img":
            self.images.append(attributes)
        if tag == "table":
            self._rows = self.tables.setdefault(attributes["id"], [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell, self._value = "", None
        elif tag == "data":
            self._value = float(attributes["value"])

    def handle_data(self, data):
        self.text += data
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag):
        if tag in ("td", "th"):
            self._rows[-1].append(self._cell if self._value is None else self._value)
            self._cell = None

    def rows(self, table):
        return self.tables[table][1:]


def svg_of(picture):
    return base64.b64decode(picture.removeprefix("data:image/svg+xml;base64,")).decode()


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    logdir = tmp_path_factory.mktemp("report") / "digits"
    loaders = {"train": loader(32, 4), "valid": loader(16, 4)}
    hparams = {"lr": 0.1, "model": {"width": 16, "name": "<b>mlp</b> & more"}}
    judge = {"monitor": "valid/accuracy", "mode": "max"}
    accuracy = [dl.AccuracyCallback("logits", "targets")]
    loggers = {"csv": dl.CSVLogger(logdir, save_diff=False)}  # the page would show changes of this checkout
    train(loaders=loaders, callbacks=accuracy, hparams=hparams, num_epochs=4, logdir=logdir, loggers=loggers, **judge)
    return logdir


@pytest.fixture(scope="module")
def page(logdir):
    return Page(write_report(logdir).read_text(encoding="utf-8"))


def test_every_number_of_the_logs_is_on_the_page(logdir, page):
    """The page has every logged value exactly, in the right row and column, as read_metrics returns it."""
    header, *rows = page.tables["passes"]

    found = {
        (stage, loader, epoch, step, metric, value)
        for stage, epoch, step, loader, *values in rows
        for metric, value in zip(header[4:], values, strict=True)
        if value != ""
    }
    table = read_metrics(logdir)[["stage", "loader", "epoch", "step", "metric", "value"]]
    assert found == set(table.itertuples(index=False, name=None))
    assert [row[1] for row in rows] == sorted(row[1] for row in rows)


def test_best_values_are_those_of_best_metrics(logdir, page):
    """The table of best values equals best_metrics, with empty cells for unknown values."""
    expected = [
        [value if pandas.notna(value) else "" for value in row]
        for row in best_metrics(logdir).drop(columns="run").itertuples(index=False)
    ]

    assert page.rows("values") == expected
    accuracy = next(row for row in expected if row[1:3] == ["valid", "accuracy"])
    assert accuracy[3] == "larger"
    assert accuracy[4] == read_metrics(logdir).query("loader == 'valid' and metric == 'accuracy'")["value"].max()


def test_checkpoints_are_those_of_the_index(logdir, page):
    """The checkpoints are those of the index, with their aliases and the meaning of the score."""
    records = read_index(logdir / "checkpoints" / "index.json")

    expected = [
        [record.name, record.stage, record.epoch, record.batch, record.size_bytes / 1e6, record.score]
        for record in records
    ]
    assert [[row[0], *row[2:]] for row in page.rows("checkpoints")] == expected
    called = {row[0]: row[1] for row in page.rows("checkpoints")}
    for alias in ("last", "best"):
        content = (logdir / "checkpoints" / f"{alias}.pth").read_bytes()
        names = {record.name for record in records if (logdir / "checkpoints" / record.name).read_bytes() == content}
        assert {name for name, aliases in called.items() if alias in aliases} == names
    assert "The score is accuracy of valid; larger is better." in page.text


def test_settings_are_shown_as_text(logdir, page):
    """Hyperparameters and environment are shown flattened, with HTML escaped."""
    assert dict(page.tables["hparams"]) == {"lr": "0.1", "model.width": "16", "model.name": "<b>mlp</b> & more"}
    environment = json.loads((logdir / "environment.json").read_text())
    shown = dict(page.tables["environment"])
    assert shown["versions.torch"] == environment["versions"]["torch"]
    assert shown["engine.name"] == "CPUEngine" and shown["seed"] == "42"
    assert not any(name.startswith("settings.") or name == "git.diff" for name in shown)
    settings = dict(page.tables["settings"])
    assert (settings["optimizer.name"], settings["batch_size.valid"], settings["num_epochs"]) == ("SGD", "4", "4")
    assert yaml.safe_load((logdir / "hparams.yml").read_text())["model"]["name"] == "<b>mlp</b> & more"


def test_the_page_needs_no_other_file_and_its_pictures_have_all_curves(logdir, page):
    """Nothing refers to other files; the loss and the monitored metric have a picture each, and lr, constant, none."""
    html = (logdir / "report.html").read_text()
    for picture in page.links:
        html = html.replace(picture, "")
    assert page.scripts == 0 and not re.search(r"@import|url\(", html)
    assert [each["alt"] for each in page.images] == ["curves of loss", "curves of accuracy"]
    assert "Not drawn: lr" in page.text
    for picture in page.links:
        svg = svg_of(picture)
        assert "<svg" in svg and "<image" not in svg and "<script" not in svg
        assert all(link.startswith("#") for link in re.findall(r'(?:href|src)="([^"]*)"', svg))
        assert all(link.startswith("#") for link in re.findall(r"url\(([^)]*)\)", svg))
        groups = re.findall(r'<g clip-path="url\([^)]*\)">\s*((?:<use [^>]*/>\s*)+)</g>', svg)
        assert [group.count("<use") for group in groups] == [4, 4]  # points of train and valid


def test_pictures_scale_with_the_page(page):
    """Each has a viewBox and no fixed size, so that a phone shows it as wide as its screen."""
    for picture in page.links:
        root = re.search(r"<svg [^>]*>", svg_of(picture))[0]
        assert 'viewBox="0 0 ' in root and 'width="100%"' in root and " height=" not in root


def test_a_nan_is_shown_and_what_was_not_logged_is_not(tmp_path):
    """A logged NaN is shown, and a value that was not logged is an empty cell."""
    log_run(tmp_path / "run", {"train": {"loss": [1.0, math.nan]}, "valid": {"auc": [0.5]}})

    page = Page(write_report(tmp_path / "run").read_text())

    assert page.tables["passes"][0] == ["stage", "epoch", "step", "loader", "loss", "auc"]
    assert page.rows("passes")[0][4:] == [1.0, ""]
    assert page.rows("passes")[1][4:] == ["", 0.5]
    assert math.isnan(page.rows("passes")[2][4]) and page.rows("passes")[2][5] == ""
    [loss] = [row for row in page.rows("values") if row[2] == "loss"]
    assert loss[3:6] == ["smaller", 1.0, 1.0] and math.isnan(loss[6])
    assert page.rows("checkpoints") == [] and page.tables["hparams"] == [["none"]]


def test_it_is_written_where_it_is_asked_for_or_says_why_not(tmp_path):
    """In a folder that is created if necessary; not below a file, of several runs, or with an invalid hparams.yml."""
    for name in "ab":
        log_run(tmp_path / name, {"train": {"loss": [1.0]}})
    (tmp_path / "file").touch()

    path = write_report(tmp_path / "a", path=tmp_path / "new" / "page.html")

    assert path == tmp_path / "new" / "page.html" and path.read_text().startswith("<!DOCTYPE html>")
    assert not (tmp_path / "a" / "report.html").exists()
    with pytest.raises(OSError, match=r"cannot write .*/file/page.html: "):
        write_report(tmp_path / "a", path=tmp_path / "file" / "page.html")
    with pytest.raises(ValueError, match=r"got 2 folders: choose the output file with path= or -o"):
        write_report([tmp_path / "a", tmp_path / "b"])
    (tmp_path / "a" / "hparams.yml").write_text("lr: [0.1")
    with pytest.raises(ValueError, match=r"hparams.yml cannot be read: "):
        write_report(tmp_path / "a")
