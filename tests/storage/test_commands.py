"""Tests of the commands and readers with URLs of runs."""

import time
from pathlib import Path
from unittest.mock import Mock

import pandas as pd
import pytest
from torch import nn

from runnerkit import best_metrics, compare_runs, dl, plot_metrics, read_metrics, write_report
from runnerkit.commands import watch as watch_module
from runnerkit.commands.cli import main
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.lease import LEASE
from runnerkit.storage.remote.store import Store
from tests.storage.stored_runs import named, objects, saving, train
from tests.test_configured_run import CONFIG
from tests.tiny import loader, mlp

RUNS = "memory://runs"


@pytest.fixture
def runs():
    """Train two runs; return their URLs."""
    urls = [f"{RUNS}/one", f"{RUNS}/two"]
    for number, url in enumerate(urls, start=1):
        train(url, saving(url), num_epochs=number)
    return urls


def ran(capsys, *arguments):
    """Run a command; return its code and output."""
    code = main([str(each) for each in arguments])
    printed = capsys.readouterr()
    return code, printed.out + printed.err


def test_metrics_are_read_from_urls(runs, tmp_path):
    """From one run, from several, and from a folder of runs; names are those of the URLs."""
    train(tmp_path / "two", num_epochs=2)

    one, both, below = read_metrics(runs[1]), read_metrics(runs), read_metrics(RUNS)

    pd.testing.assert_frame_equal(one, read_metrics(tmp_path / "two"))
    assert set(one["run"]) == {"two"} and set(both["run"]) == set(below["run"]) == {"one", "two"}
    assert len(both) == len(below) and set(best_metrics(runs)["run"]) == {"one", "two"}
    assert "two" in str(compare_runs(runs))
    with pytest.raises(FileNotFoundError, match="memory://runs/three: nothing is there"):
        read_metrics(f"{RUNS}/three")


def test_runs_of_the_same_name_are_told_apart_by_their_urls():
    urls = ["memory://runs/one", "memory://others/one"]
    for url in urls:
        train(url, num_epochs=1)

    assert set(read_metrics(urls)["run"]) == set(urls)


def test_a_manifest_of_another_program_is_not_a_run(runs):
    """A folder of runs may have other files in it, and an unreadable one must not hide the runs."""
    Store(RUNS).write("website/manifest.json", b'{"name": "My site"}')

    assert set(read_metrics(RUNS)["run"]) == {"one", "two"}


def test_plots_and_reports_are_written_to_urls(runs, tmp_path):
    """By default beside the run; a local path is local."""
    plots = [plot_metrics(runs[0], path=path) for path in (None, f"{RUNS}/both.png", tmp_path / "a.png")]
    reports = [write_report(runs[0]), write_report(runs[0], path=tmp_path / "a.html")]

    assert {"metrics.png", "report.html"} <= set(objects(runs[0])) and "both.png" in objects(RUNS)
    assert plots[2] == tmp_path / "a.png" and (tmp_path / "a.png").stat().st_size > 1000
    assert "<html" in (tmp_path / "a.html").read_text() and reports[1] == tmp_path / "a.html"


def test_the_commands_that_read_take_urls(runs, capsys, tmp_path, monkeypatch):
    """They print URLs, and never the place of a copy."""
    monkeypatch.chdir(tmp_path)
    commands = {
        "metrics": ["metrics", *runs], "plot": ["plot", runs[0]], "report": ["report", runs[0]],
        "doctor": ["doctor", runs[0]], "watch": ["watch", runs[0], "--once"],
        "export": ["export", runs[0], "--to", "safetensors"],
        "export one": ["export", f"{runs[0]}/checkpoints/best.pth", "--to", "safetensors", "-o", "w.safetensors"],
        "fetch": ["fetch", runs[0], "fetched"], "fetch one": ["fetch", f"{runs[0]}/csv", "csv"],
    }  # fmt: skip
    results = {name: ran(capsys, *arguments) for name, arguments in commands.items()}

    assert {name: code for name, (code, _) in results.items()} == dict.fromkeys(commands, 0), results
    assert [name for name, (_, text) in results.items() if "copy-" in text or ",," in text] == []
    assert results["plot"][1] == f"{runs[0]}/metrics.png\n" and results["report"][1] == f"{runs[0]}/report.html\n"
    assert results["export"][1] == f"{runs[0]}/model.safetensors\n" and Path("w.safetensors").exists()
    assert f"{runs[0]}: all is good" in results["doctor"][1]
    assert Path("fetched/checkpoints/last.pth").exists() and Path("csv/train.csv").exists()
    assert Path("fetched/csv/train.csv").read_text() == Path("csv/train.csv").read_text()


def test_a_url_without_a_run_is_named(capsys, tmp_path, monkeypatch):
    """Each command ends with code 2 and one line."""
    monkeypatch.chdir(tmp_path)
    url = f"{RUNS}/none"
    for arguments in (["metrics", url], ["plot", url], ["report", url], ["doctor", url], ["watch", url],
                      ["export", url, "--to", "safetensors"], ["fetch", url, "here"]):  # fmt: skip
        code, text = ran(capsys, *arguments)

        assert code == 2 and url in text and text.count("\n") == 1, (arguments, text)
    assert not Path("here").exists() and objects(RUNS) == []


def test_fetch_needs_a_url_and_a_new_folder(runs, capsys, tmp_path):
    """It overwrites nothing."""
    assert "is not the URL of a store" in ran(capsys, "fetch", tmp_path, tmp_path / "new")[1]
    assert "exists: choose a new folder" in ran(capsys, "fetch", runs[0], tmp_path)[1]


def test_doctor_reports_the_lease_and_damage(runs, capsys):
    """Of a run that is writing, or was killed; and of a checkpoint whose object somebody has changed."""
    Store(runs[0]).write(LEASE, b'{"holder": "process 7 on mars"}')
    code, text = ran(capsys, "doctor", runs[0])

    assert code == 0 and "a run is writing here, process 7 on mars, or was killed" in text


def test_watch_reads_a_store_less_often(runs, monkeypatch):
    """A run uploads its logs less often than a disk is read."""
    pauses = []

    def sleep(pause_s):
        pauses.append(pause_s)
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_module, "time", Mock(wraps=time, sleep=sleep))
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a terminal

    main(["watch", runs[0]])

    assert pauses == [10.0]


def test_a_configured_run_may_have_a_url(capsys, tmp_path, monkeypatch):
    """Its config is there, a second one needs --resume, and an export uses the config."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    url = f"{RUNS}/configured"

    results = [
        ran(capsys, "run", "config.yaml", "--logdir", url, "num_epochs=1"),
        ran(capsys, "run", "config.yaml", "--logdir", url),
        ran(capsys, "run", "config.yaml", "--logdir", url, "--resume"),
        ran(capsys, "export", url, "--to", "torch-export", "-o", "model.pt2"),
    ]

    assert [code for code, _ in results] == [0, 2, 0, 0], results
    assert results[0][1].splitlines()[-1] == url
    assert f"{url} contains a run: continue it with --resume" in results[1][1]
    assert "config.yml" in objects(url) == named(url)
    assert set(read_metrics(url)["epoch"]) == {1, 2}


def test_a_search_may_have_a_url(capsys, tmp_path, monkeypatch):
    """Its trials and the best config are there, a run starts from that, and a second search needs another URL."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    url = f"{RUNS}/search"
    words = ["config.yaml", "--trials", "2", "--engine", "cpu", "--logdir", url, "optimizer.lr=1e-9,0.1"]

    code, out = ran(capsys, "tune", *words)
    assert code == 0 and out.splitlines()[-1] == f"runnerkit run {url}/best.yml"
    assert ran(capsys, "run", f"{url}/best.yml", "--logdir", f"{RUNS}/best")[0] == 0
    again = ran(capsys, "tune", *words)

    assert again[0] == 2 and f"{url} contains the trials of another search" in again[1]
    assert {name.partition("/")[0] for name in objects(url)} == {"best.yml", "trial-000", "trial-001"}
    best, *trials = (read_metrics(each) for each in (f"{RUNS}/best", f"{url}/trial-000", f"{url}/trial-001"))
    assert best["value"].tolist() in [each["value"].tolist() for each in trials]


def test_predictions_are_written_to_a_url():
    """The file is the one that a local path gets."""
    runner = dl.SupervisedRunner(mlp())

    runner.predict_to(f"{RUNS}/predictions/a.csv", loader=loader(8, 4))

    found = local_copy(f"{RUNS}/predictions/a.csv").read_text().splitlines()
    assert objects(RUNS) == ["predictions/a.csv"] and len(found) == 1 + 8


def test_a_prediction_that_fails_writes_nothing():
    class Fails(nn.Module):
        def forward(self, x):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        dl.SupervisedRunner(Fails()).predict_to(f"{RUNS}/a.csv", loader=loader(8, 4))

    assert objects(RUNS) == []


def test_what_callbacks_write_arrives():
    """Exports, profiles and tables, beside the logs."""
    url = f"{RUNS}/one"

    class Table(dl.Callback):
        def on_epoch_end(self, runner):
            runner.log_table("examples", {"name": ["a", "b"], "value": [1, 2]})

    callbacks = [
        saving(url), Table(dl.CallbackOrder.External), dl.TracingCallback("features", logdir=url),
        dl.ProfilerCallback(f"{url}/traces/profile.json", num_batches=1),
    ]  # fmt: skip
    train(url, *callbacks, num_epochs=1)

    kinds = {name.partition("/")[0] for name in objects(url)}
    assert {"tables", "csv", "tensorboard", "checkpoints"} <= kinds, kinds
    assert any(name.endswith((".pt2", ".onnx", ".pt")) for name in objects(url)), objects(url)
    assert "traces/profile.json" in objects(url)
    assert objects(url) == named(url)
