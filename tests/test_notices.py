"""Tests of the lines that say that a run starts, resumes, stops early and loads the best weights."""

import io

import pytest
import torch

from runnerkit import dl
from tests.tiny import loader, mlp, train

LOADERS = {"train": loader(16, 4), "valid": loader(12, 4)}
VALID = {"monitor": "valid/loss", "mode": "min"}


def told(**options):
    """Train with a console; return its lines about the run and the runner."""
    text = io.StringIO()
    runner = train(loaders=LOADERS, loggers={"console": dl.ConsoleLogger(file=text)}, **options)
    return [line for line in text.getvalue().splitlines() if not line.startswith(("epoch ", "started: "))], runner


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "bf16"}, "CPUEngine, 1 process, bfloat16, cpu"),
        ({"num_processes": 2}, "DistributedDataParallelEngine, 2 processes, fp32, cpu"),
    ],
)
def test_a_run_that_starts_says_where(tmp_path, capfd, options, words):
    """Engine, processes, precision, device and logdir in the first line, once; an evaluation says nothing."""
    runner = train(loaders=LOADERS, loggers={"console": dl.ConsoleLogger()}, logdir=tmp_path, **options)
    runner.evaluate_loader(LOADERS["valid"], cpu=True)

    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == f"started: {words}; logs in {tmp_path}"
    assert sum("started: " in line for line in lines) == 1


def test_a_run_that_resumes_says_from_what(tmp_path):
    """The checkpoint, its epoch and step, in one line before the first metrics; a new run says nothing."""
    first, _ = told(num_epochs=1, logdir=tmp_path, resume="auto")

    lines, _ = told(num_epochs=2, logdir=tmp_path, resume="auto")

    assert first == []
    [line] = lines
    assert line.startswith(f"resumed from {tmp_path}/checkpoints/") and line.endswith(": epoch 1, step 4")


def test_a_run_that_stops_early_says_why():
    """The metric, for how long, the best value and its epoch, which is not the last."""
    model = mlp()
    climbing = torch.optim.SGD(model.parameters(), lr=0.1, maximize=True)
    stop = dl.EarlyStoppingCallback(2, monitor="valid/loss", mode="min")

    [line], runner = told(model=model, optimizer=climbing, callbacks=[stop], num_epochs=9)

    best = runner.experiment_metrics[1]["valid"]["loss"]
    why = f"loss of valid has not improved for 2 epochs; its best is {best:.4g}, epoch 1"
    assert line == f"stopped early after epoch 3: {why}"


def test_the_best_weights_are_named(tmp_path):
    """Their epoch and score, once, after training."""
    [line], runner = told(num_epochs=2, logdir=tmp_path, load_best_on_end=True, **VALID)

    losses = {epoch: each["valid"]["loss"] for epoch, each in runner.experiment_metrics.items()}
    epoch = min(losses, key=losses.get)
    assert line == f"loaded the best weights, of epoch {epoch}: loss of valid {losses[epoch]:.4g}"


def test_without_a_console_they_are_log_messages(tmp_path, caplog):
    """Of level INFO."""
    with caplog.at_level("INFO"):
        train(loaders=LOADERS, num_epochs=1, logdir=tmp_path, load_best_on_end=True, **VALID)

    assert [each.levelname for each in caplog.records if "loaded the best weights" in each.getMessage()] == ["INFO"]


def test_the_momentum_is_logged_if_asked_for():
    """And not otherwise; it is that of the optimizer."""
    asked = train(callbacks=[dl.OptimizerCallback(log_momentum=True)])

    assert asked.epoch_metrics["train"]["momentum"] == 0.9
    assert "momentum" not in train().epoch_metrics["train"]
