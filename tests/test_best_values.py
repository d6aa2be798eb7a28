"""Tests of best_metrics and compare_runs: best values, their epochs and the ranking of runs."""

import math

import pandas as pd
import pytest

from runnerkit import dl
from runnerkit.checkpoints.index import read_index
from runnerkit.history.best_values import best_metrics, compare_runs
from tests.runs import judge_run, log_run
from tests.tiny import loader, train

CURVES = {
    "train": {"loss": [0.9, 0.5, 0.6], "lr": [0.1, 0.1, 0.05]},
    "valid": {"loss": [0.8, 0.7, 0.7], "accuracy": [0.5, 0.75, 0.6]},
}


@pytest.fixture
def run(tmp_path):
    """Return the logdir of a run that logged CURVES."""
    log_run(tmp_path / "run", CURVES)
    return tmp_path / "run"


def row(table, **where):
    """Return the only row of `table` with these values, as a dict."""
    for column, value in where.items():
        table = table[table[column] == value]
    [found] = table.to_dict("records")
    return found


def test_best_values_are_those_of_the_curves(run):
    """The smallest, largest and last values agree with a loop over the values; ties give the first epoch."""
    summary = best_metrics(run)

    for key, metrics in CURVES.items():
        for metric, values in metrics.items():
            found = row(summary, loader=key, metric=metric)
            for extreme, value in (("smallest", min(values)), ("largest", max(values))):
                assert (found[extreme], found[f"{extreme}_epoch"]) == (value, values.index(value) + 1)
            assert found["last"] == values[-1]
    assert len(summary) == 4


def test_what_is_better_is_said_only_where_it_is_known(run):
    """Only the loss and the metric that selected the checkpoints have a direction, for every loader."""
    before = best_metrics(run)
    judge_run(run, "train", "accuracy", minimize=False)

    after = best_metrics(run)

    loss = row(before, loader="train", metric="loss")
    assert (loss["better"], loss["best"], loss["best_epoch"]) == ("smaller", 0.5, 2)
    unknown = row(before, metric="accuracy")
    assert unknown["better"] == "" and math.isnan(unknown["best"]) and pd.isna(unknown["best_epoch"])
    accuracy = row(after, metric="accuracy")
    assert (accuracy["better"], accuracy["best"], accuracy["best_epoch"]) == ("larger", 0.75, 2)


def test_runs_that_disagree_about_a_metric_leave_it_open(tmp_path):
    """If one run maximizes a metric and another minimizes it, neither has a best value."""
    for name, minimize in {"a": True, "b": False}.items():
        log_run(tmp_path / name, CURVES)
        judge_run(tmp_path / name, "valid", "accuracy", minimize=minimize)

    assert set(best_metrics(tmp_path).query("metric == 'accuracy'")["better"]) == {""}
    assert best_metrics(tmp_path / "b").query("metric == 'accuracy'")["better"].item() == "larger"


def test_nan_is_never_the_best_and_may_be_the_last(tmp_path):
    """The best value is the best finite one; a metric without finite values has none."""
    log_run(tmp_path / "run", {"valid": {"loss": [0.5, math.nan], "lost": [math.nan, math.nan]}})

    summary = best_metrics(tmp_path / "run")

    loss, lost = row(summary, metric="loss"), row(summary, metric="lost")
    assert (loss["best"], loss["best_epoch"], loss["largest"]) == (0.5, 1, 0.5)
    assert math.isnan(loss["last"])
    assert math.isnan(lost["smallest"]) and pd.isna(lost["smallest_epoch"])


def test_checkpoints_say_what_they_were_judged_by(tmp_path):
    """index.json holds `monitor` and `mode`; the best epoch is that of best.pth."""
    judged = {"monitor": "valid/accuracy", "mode": "max"}
    callbacks = [dl.AccuracyCallback("logits", "targets")]
    loaders = {"train": loader(16, 4), "valid": loader(8, 4)}
    train(loaders=loaders, callbacks=callbacks, num_epochs=4, logdir=tmp_path, **judged)

    folder = tmp_path / "checkpoints"
    records = read_index(folder / "index.json")
    judge = {"loader": "valid", "metric": "accuracy", "minimize": False}
    assert [record.judged_by for record in records] == [judge] * len(records)
    best = row(best_metrics(tmp_path), loader="valid", metric="accuracy")
    [chosen] = [record for record in records if (folder / record.name).samefile(folder / "best.pth")]
    assert (best["best"], best["best_epoch"]) == (chosen.score, chosen.epoch)


def test_runs_are_compared_by_what_their_checkpoints_were_judged_by(tmp_path):
    """The best run comes first; a run that did not log the metric comes last, without values."""
    for name, values in {"a": [0.5, 0.6], "b": [0.7, 0.4], "c": [0.1, 0.65]}.items():
        log_run(tmp_path / name, {"train": {"loss": [1.0, 0.5]}, "test": {"accuracy": values, "loss": [1.0, 1.0]}})
        judge_run(tmp_path / name, "test", "accuracy", minimize=False)
    log_run(tmp_path / "d", {"train": {"loss": [1.0, 0.5]}})

    compared = compare_runs(tmp_path)

    assert compared["run"].tolist() == ["b", "c", "a", "d"]
    assert compared["best"].tolist()[:3] == [0.7, 0.65, 0.6] and math.isnan(compared["best"].tolist()[3])
    assert compared["best_epoch"].tolist()[:3] == [1, 2, 2]
    assert compared["last"].tolist()[:3] == [0.4, 0.65, 0.6]
    assert set(compared["loader"].dropna()) == {"test"} and set(compared["metric"].dropna()) == {"accuracy"}


def test_runs_without_checkpoints_are_compared_by_the_valid_loss(tmp_path):
    """The run with the smallest valid loss comes first."""
    for name, values in {"a": [0.5, 0.4], "b": [0.3, 0.9]}.items():
        log_run(tmp_path / name, {"train": {"loss": [0.1]}, "valid": {"accuracy": [0.5, 0.5], "loss": values}})

    compared = compare_runs([tmp_path / "a", tmp_path / "b"])

    assert compared[["run", "best", "best_epoch"]].to_numpy().tolist() == [["b", 0.3, 1], ["a", 0.4, 2]]


def test_without_a_direction_runs_stay_in_order(tmp_path):
    """Runs keep their order if it is unknown whether a large value is better."""
    for name, values in {"a": [1.0], "b": [9.0], "c": [5.0]}.items():
        log_run(tmp_path / name, {"train": {"norm": values}})

    assert compare_runs([tmp_path / name for name in "cab"])["run"].tolist() == ["c", "a", "b"]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"metric": "lossy"}, "metrics ['lossy'] were not logged by ['valid']; choose from ['loss', 'accuracy']"),
        ({"loader": "vaild"}, "loaders ['vaild'] were not logged; choose from ['train', 'valid']"),
        ({"loader": "train", "metric": "accuracy"}, "['accuracy'] were not logged by ['train']; choose from ['loss',"),
    ],
)
def test_what_was_not_logged_is_refused_by_name(run, wanted, message):
    """The error lists the logged names."""
    with pytest.raises(KeyError) as error:
        compare_runs(run, **wanted)

    assert message in error.value.args[0]


def test_a_damaged_index_leaves_the_numbers(run):
    """A damaged index gives values without a direction; `runnerkit doctor` reports the damage."""
    judge_run(run, "valid", "accuracy", minimize=False)
    index = run / "checkpoints" / "index.json"
    text = index.read_text()
    index.write_text(text.replace('"minimize"', '"maximize"'))
    with pytest.raises(ValueError, match=r"index.json is damaged .*judged_by .* of model.0001.pth"):
        read_index(index)  # it decides which checkpoints are kept
    index.write_text(text[:50])

    assert row(best_metrics(run), metric="accuracy")["better"] == ""
