"""The table at the end of a run."""

import math
import re

import pytest

from runnerkit import dl, read_metrics
from runnerkit.callbacks.monitor import run_summary
from tests.callbacks.recording import Kept
from tests.callbacks.stand_ins import make_runner
from tests.tiny import loader, train


def summary(runner):
    texts = {}
    runner.loggers, runner.log_text = {}, texts.__setitem__
    callback = dl.RunSummaryCallback()
    callback.on_experiment_start(runner)
    callback.on_experiment_end(runner)
    return texts["summary"].splitlines()


def finished(epochs, **attributes):
    attributes |= {"epoch_step": len(epochs), "batch_step": 40, "step": None, "callbacks": {}}
    return make_runner(experiment_metrics=epochs, **attributes)


def test_last_smallest_and_largest_stand_with_their_epochs(monkeypatch):
    """Of equal values the first counts, NaN never does, and names that begin with "_" are hidden."""
    times = iter([10.0, 85.0])
    monkeypatch.setattr(run_summary.time, "monotonic", lambda: next(times))
    epochs = {
        1: {"train": {"loss": 2.0, "_timer/_fps": 9.0}, "valid": {"auc": math.nan}},
        2: {"train": {"loss": 0.123456}, "valid": {"auc": math.nan, "f1": 0.5}},
        3: {"train": {"loss": math.nan}, "valid": {"auc": math.nan, "f1": 0.5}},
    }

    assert summary(finished(epochs)) == [
        "loader  metric  last     min  epoch  max  epoch",
        "train   loss     nan  0.1235      2    2      1",
        "valid   auc      nan       -      -    -      -",
        "valid   f1       0.5     0.5      2  0.5      2",
        "epoch 3, step 40, in 01:15",
    ]


@pytest.mark.parametrize(("minimize", "expected"), [(True, "0.25, epoch 2"), (False, "0.5, epoch 1")])
def test_best_is_told_where_a_checkpoint_is_chosen_by_it(tmp_path, minimize, expected):
    """The callback that chooses the best checkpoint defines whether smaller or larger is better."""
    runner = finished({1: {"valid": {"score": 0.5}}, 2: {"valid": {"score": 0.25}}})
    runner.callbacks = {
        "save": dl.CheckpointCallback(tmp_path, monitor="valid/score", mode="min" if minimize else "max")
    }

    assert summary(runner)[-2] == f"best score of valid: {expected}"


def run(texts, logdir, **options):
    return train(
        loaders={"train": loader(32, 8, shuffle=True), "valid": loader(21, 8)},
        callbacks=[dl.AccuracyCallback("logits", "targets")],
        loggers={"tensorboard": None, "texts": texts},
        logdir=logdir, verbose=True, monitor="valid/accuracy", mode="max",
        **options,
    )  # fmt: skip


def test_numbers_are_those_of_the_logs(tmp_path):
    """The table includes epochs before a resume, and gives the folder of the logs."""
    run(Kept(), tmp_path, num_epochs=2)
    texts = Kept()
    runner = run(texts, tmp_path, num_epochs=4, resume="auto")
    runner.evaluate_loader(loader(8, 8), cpu=True)

    [text] = texts.texts  # the first part has logged the model's table; an evaluation adds none
    lines = text.splitlines()
    logged = read_metrics(tmp_path).groupby(["loader", "metric"], sort=False)["value"]
    assert len(lines) == 1 + len(logged) + 3
    for (loader_key, metric), values in logged:
        [cells] = [line.split()[2:] for line in lines if line.split()[:2] == [loader_key, metric]]
        assert len(values) == 4
        epochs = [str(values.reset_index(drop=True).agg(each) + 1) for each in ("idxmin", "idxmax")]
        low, high, last = (f"{value:.4g}" for value in (values.min(), values.max(), values.iloc[-1]))
        assert cells == [last, low, epochs[0], high, epochs[1]]
    best = runner.experiment_metrics
    value = max(best[epoch]["valid"]["accuracy"] for epoch in best)
    assert lines[-3].startswith(f"best accuracy of valid: {value:.4g}, epoch ")
    assert re.fullmatch(r"epoch 4, step 16, in 00:\d\d", lines[-2])
    assert lines[-1] == f"logs in {tmp_path}"


def test_a_logdir_in_a_store_is_its_url():
    """The local folder that stands for it is temporary."""
    texts = Kept()
    train(callbacks=[dl.RunSummaryCallback()], loggers={"texts": texts}, logdir="memory://runs/mine")

    assert texts.texts[-1].splitlines()[-1] == "logs in memory://runs/mine"


def test_run_that_fails_has_none():
    """A failed run ends with its exception."""

    class Fails(dl.Callback):
        def on_epoch_end(self, runner):
            raise ArithmeticError("no")

    texts = Kept()
    with pytest.raises(ArithmeticError):
        train(callbacks=[Fails(0)], loggers={"texts": texts}, verbose=True)

    assert len(texts.texts) == 1
