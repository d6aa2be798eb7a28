"""Tests that the best checkpoint is chosen by one metric, also when a resumed run chooses by another."""

import json
import logging

import pytest
import torch

from runnerkit import dl
from tests.tiny import loader, mlp, sgd, train, weights

LOSS = {"monitor": "valid/loss", "mode": "min"}
ACCURACY = {"monitor": "valid/accuracy", "mode": "max"}
OTHER = {**LOSS, "monitor": "test/loss"}
WORST = {**LOSS, "mode": "max"}
NONE: dict[str, object] = {}


def start(logdir, judge, num_epochs, *, has_accuracy=True, **options):
    model, callbacks = mlp(), [dl.AccuracyCallback("logits", "targets")] if has_accuracy else []
    loaders = {"train": loader(16, 4), "valid": loader(8, 4, seed=1), "test": loader(8, 4, seed=2)}
    options |= {"callbacks": callbacks, "num_epochs": num_epochs, "logdir": logdir, "resume": "auto", **judge}
    return train(model, optimizer=sgd(model, lr=1.5), loaders=loaders, **options)


def index(logdir):
    return json.loads((logdir / "checkpoints" / "index.json").read_text())["checkpoints"]


def best(logdir):
    """Return the epoch of best.pth, by its weights."""
    wanted = torch.load(logdir / "checkpoints" / "best.pth", weights_only=True)["model_state_dict"]
    for record in index(logdir):
        state = torch.load(logdir / "checkpoints" / record["name"], weights_only=True)["model_state_dict"]
        if all(torch.equal(wanted[key], state[key]) for key in wanted):
            return record["epoch"]
    raise AssertionError("best.pth is not in the index")


@pytest.mark.parametrize("after", [LOSS, ACCURACY, OTHER, WORST], ids=["loss", "accuracy", "test", "worst"])
@pytest.mark.parametrize(
    "before", [LOSS, ACCURACY, OTHER, WORST, NONE], ids=["loss", "accuracy", "test", "worst", "none"]
)
def test_the_best_checkpoint_is_the_best_by_one_metric(tmp_path, before, after):
    """After a resume with another metric, direction or loader, all checkpoints are compared by the new one."""
    start(tmp_path, before, 3)
    kept = {record["epoch"] for record in index(tmp_path)}
    runner = start(tmp_path, after, 6)
    loader, metric = after["monitor"].split("/")
    metrics = {epoch: all_of[loader] for epoch, all_of in runner.experiment_metrics.items()}
    candidates = {epoch: metrics[epoch][metric] for epoch in [*kept, 4, 5, 6]}
    choose = {"min": min, "max": max}[after["mode"]]
    assert candidates[best(tmp_path)] == choose(candidates.values())


def test_without_a_metric_the_best_checkpoint_stays(tmp_path):
    """A run that continues without a metric keeps the best checkpoint of the one before."""
    start(tmp_path, LOSS, 3)
    before = best(tmp_path)
    start(tmp_path, NONE, 6)
    assert best(tmp_path) == before


def test_a_change_is_said(tmp_path, caplog):
    """The warning names both metrics; there is none without a change."""
    start(tmp_path, LOSS, 2)
    with caplog.at_level(logging.WARNING):
        start(tmp_path, LOSS, 3)
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        start(tmp_path, ACCURACY, 4)
    assert "'loss'" in caplog.text and "'accuracy'" in caplog.text and "larger" in caplog.text


def test_a_metric_that_earlier_checkpoints_lack(tmp_path, caplog):
    """They cannot be the best, and the warning names them."""
    start(tmp_path, LOSS, 2, has_accuracy=False)
    start(tmp_path, ACCURACY, 3)
    assert best(tmp_path) == 3
    assert "model.0002" in caplog.text


def test_a_best_checkpoint_of_a_lower_score_does_not_hide_a_new_one(tmp_path):
    """A loss of 5 does not beat an accuracy of 0.9: load_best_on_end loads the best by accuracy."""
    start(tmp_path, WORST, 2)
    runner = start(tmp_path, ACCURACY, 4, load_best_on_end=True)
    by_epoch = {record["epoch"]: record for record in index(tmp_path)}
    state = torch.load(tmp_path / "checkpoints" / by_epoch[best(tmp_path)]["name"], weights_only=True)
    model = mlp()
    model.load_state_dict(state["model_state_dict"])
    assert torch.equal(weights(runner.model), weights(model))
    assert all(0 <= record["score"] <= 1 for record in index(tmp_path))
