"""Tests of a run's logs: CSV, TensorBoard and metric attributes agree, and only rank zero writes."""

import csv
import json
import os
import sys
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from runnerkit import dl, read_metrics
from tests.interrupt import at
from tests.tiny import loader, train


def train_in(logdir, **options):
    callbacks = [dl.AccuracyCallback("logits", "targets", topk=(1, 2))]
    loaders = {"train": loader(40, 4, shuffle=True), "valid": loader(21, 4)}
    options = {"callbacks": callbacks, "num_epochs": 3, "hparams": {"lr": 0.1, "name": "tiny"}, **options}
    return train(loaders=loaders, logdir=logdir, **options)


def scalars(folder):
    found = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


@pytest.mark.parametrize("num_processes", [1, 2])
def test_csv_tensorboard_and_attributes_agree(tmp_path, num_processes):
    """CSV, TensorBoard (float32) and the attributes have the same values, each once per epoch."""
    runner = train_in(tmp_path, num_processes=num_processes)

    for key in ("train", "valid"):
        with (tmp_path / "csv" / f"{key}.csv").open() as file:
            rows = list(csv.DictReader(file))
        series = scalars(tmp_path / "tensorboard" / key)
        assert [row["epoch"] for row in rows] == ["1", "2", "3"]
        for epoch, row in enumerate(rows, start=1):
            metrics = {name: float(value) for name, value in row.items() if name not in ("stage", "epoch", "step")}
            assert metrics == runner.experiment_metrics[epoch][key]
        for name in metrics:
            values = [runner.experiment_metrics[epoch][key][name] for epoch in (1, 2, 3)]
            assert series[name] == [(1 + index, pytest.approx(value, rel=1e-6)) for index, value in enumerate(values)]
        assert set(series) == set(metrics)


def test_only_rank_zero_writes(tmp_path):
    """With several processes, rank zero writes each file once, and no other files exist."""
    counts = tmp_path / "counts"
    counts.mkdir()

    class CountingLogger(dl.ILogger):
        def setup(self, *, resumed_at=None):
            (counts / str(os.getpid())).touch()

        def log_scalars(self, scalars, *, step, scope):
            pass

    logdir = tmp_path / "log"
    train_in(logdir, num_processes=3, loggers={"count": CountingLogger()}, monitor="valid/loss")

    assert len(list(counts.iterdir())) == 1
    assert len(list(logdir.glob("tensorboard/*/events.*"))) == 2
    files = {str(path.relative_to(logdir)) for path in logdir.rglob("*") if path.is_file()}
    checkpoints = {f"checkpoints/{name}" for name in ("best.pth", "index.json", "last.pth", *json_names(logdir))}
    others = {"csv/train.csv", "csv/valid.csv", "environment.json", "hparams.yml", "status.json"}
    assert {each for each in files if "events" not in each} == checkpoints | others
    environment = json.loads((logdir / "environment.json").read_text())
    assert environment["engine"]["num_processes"] == 3 and environment["seed"] == 42
    assert environment["command"] == sys.argv
    status = json.loads((logdir / "status.json").read_text())
    assert status["state"] == "finished" and status["pid"] != os.getpid()
    assert yaml.safe_load((logdir / "hparams.yml").read_text()) == {"lr": 0.1, "name": "tiny"}


def json_names(logdir):
    records = json.loads((logdir / "checkpoints" / "index.json").read_text())["checkpoints"]
    return sorted(record["name"] for record in records)


def test_without_logdir_nothing_is_written(tmp_path, monkeypatch):
    """A run without logdir creates no folder and no file."""
    monkeypatch.chdir(tmp_path)

    train_in(None)

    assert list(Path.cwd().iterdir()) == []


def test_a_relative_logdir_stays_where_it_was(tmp_path, monkeypatch):
    """A relative logdir is kept when the run changes the working directory, and a later run resumes from it."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()

    go_elsewhere = at("on_epoch_start", lambda runner: os.chdir(elsewhere))
    for num_epochs in (2, 3):
        monkeypatch.chdir(tmp_path)
        resume = "log" if num_epochs == 3 else None
        train_in("log", callbacks=[go_elsewhere], num_epochs=num_epochs, profile=True, resume=resume)

    assert list(elsewhere.iterdir()) == []
    assert read_metrics(tmp_path / "log").epoch.unique().tolist() == [1, 2, 3]
    assert [epoch for epoch, _ in scalars(tmp_path / "log" / "tensorboard" / "train")["loss"]] == [1, 2, 3]
    assert json_names(tmp_path / "log") == ["model.0002.pth", "model.0003.pth"]
    assert (tmp_path / "log" / "trace.json").is_file()


def test_step_metrics_are_logged_every_so_many_steps(tmp_path):
    """log_every=5 logs batch values at steps 5, 10, ..., in TensorBoard under batch/ and in a separate CSV file."""
    losses = {}

    def keep(runner):
        if runner.is_train_loader:
            losses[runner.batch_step] = runner.batch_metrics["loss"].item()

    kinds = {"csv": dl.CSVLogger, "tensorboard": dl.TensorboardLogger}
    loggers = {name: kind(tmp_path, log_batch_metrics=True) for name, kind in kinds.items()}
    train_in(tmp_path, callbacks=[at("on_batch_end", keep)], loggers=loggers, log_every=5)

    expected = [(step, losses[step]) for step in range(5, 31, 5)]
    assert scalars(tmp_path / "tensorboard" / "train")["batch/loss"] == expected
    frame = read_metrics(tmp_path, scope="batch")
    losses, rates = (frame[frame.metric == name] for name in ("loss", "lr"))
    assert list(zip(losses.step, losses.value, strict=True)) == expected
    assert rates.step.tolist() == [step for step, _ in expected] and len(losses) + len(rates) == len(frame)
