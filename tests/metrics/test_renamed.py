"""Tests of metrics' old names, which results still have."""

import copy
import pickle

import pytest
import torch

from runnerkit import dl
from runnerkit.checkpoints.index import read_index
from runnerkit.metrics.renamed import NamedMetrics
from tests.interrupt import at
from tests.tiny import loader, train

LOADERS = {"train": loader(16, 4), "valid": loader(12, 4)}
OLD = pytest.warns(FutureWarning, match=r"'accuracy01' is now called 'accuracy' only: write 'accuracy'")


def fit(**options):
    return train(loaders=LOADERS, callbacks=[dl.AccuracyCallback("logits", "targets")], **options)


def test_top_1_accuracy_is_logged_once():
    """The metrics of a loader have it as `accuracy` only."""
    metrics = fit().epoch_metrics["valid"]

    assert set(metrics) == {"loss", "accuracy"}


def test_the_old_name_is_read_with_a_warning_that_says_what_to_write():
    """By index, get and in; other unknown names raise as before."""
    runner = fit()
    metrics = runner.epoch_metrics["valid"]

    for read in (lambda: metrics["accuracy01"], lambda: metrics.get("accuracy01"),
                 lambda: runner.experiment_metrics[1]["valid"]["accuracy01"]):  # fmt: skip
        with OLD:
            assert read() == metrics["accuracy"]
    assert "accuracy01" in metrics and "accuracy03" not in metrics
    keys = metrics.keys()
    assert "accuracy01" in keys and "accuracy03" not in keys and [*keys] == ["loss", "accuracy"]
    assert keys - {"loss"} == {"accuracy"} and {**metrics} == dict(metrics.items())
    assert metrics.get("accuracy03", 7) == 7
    with pytest.raises(KeyError, match="accuracy03"):
        metrics["accuracy03"]


def test_a_users_metric_with_the_old_name_is_kept():
    """No warning, and no other value."""
    assert NamedMetrics(accuracy01=1.0, accuracy=0.5)["accuracy01"] == 1.0


def test_prefix_and_suffix_stay():
    """Of two heads, each is found by its old name."""
    metrics = NamedMetrics(one_accuracy_z=0.5, two_accuracy_z=0.25)

    with pytest.warns(FutureWarning, match="'two_accuracy_z'"):
        assert metrics["two_accuracy01_z"] == 0.25


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_are_the_same(copied):
    """Results come from other processes, and checkpoints copy them."""
    metrics = NamedMetrics(accuracy=0.5)

    assert copied(metrics) == metrics == {"accuracy": 0.5}
    assert "accuracy01" in copied(metrics)


def test_users_can_save_results_as_weights(tmp_path):
    """torch.load refuses unknown classes by default."""
    metrics = fit().experiment_metrics

    torch.save(metrics, tmp_path / "metrics.pt")

    assert torch.load(tmp_path / "metrics.pt", weights_only=True) == metrics


def test_a_checkpoint_is_selected_by_the_new_name(tmp_path):
    """monitor="valid/accuracy01" warns, and index.json has today's name, so that runs are comparable."""
    with OLD:
        fit(num_epochs=2, logdir=tmp_path, monitor="valid/accuracy01", mode="max",
            load_best_on_end=True)  # fmt: skip

    judged = [record.judged_by for record in read_index(tmp_path / "checkpoints" / "index.json")]
    assert judged == [{"loader": "valid", "metric": "accuracy", "minimize": False}] * len(judged)
    state = torch.load(tmp_path / "checkpoints" / "last.pth", weights_only=True)
    assert set(state["counters"]["epoch_metrics"]["valid"]) == {"loss", "accuracy"}


def test_early_stopping_reads_it_by_the_old_name():
    """And warns."""
    stop = dl.EarlyStoppingCallback(1, monitor="valid/accuracy01", mode="max", min_delta=2.0)

    with OLD:
        runner = train(loaders=LOADERS, callbacks=[dl.AccuracyCallback("logits", "targets"), stop], num_epochs=9)

    assert runner.epoch_step == 2


def test_callbacks_read_it_by_the_old_name():
    """The metrics of a loader at its end, and those that are aggregated, of a loader or a batch."""
    old = ["accuracy01", "accuracy02"]
    seen = []
    callbacks = [
        dl.AccuracyCallback("logits", "targets", topk=(1, 2)),
        *(dl.MetricAggregationCallback(scope, old, scope=scope) for scope in ("loader", "batch")),
        dl.MetricAggregationCallback("weighted", {"accuracy01": 3.0, "accuracy02": 1.0}, "weighted_mean"),
        at("on_loader_end", lambda runner: seen.append(runner.loader_metrics["accuracy01"])),
    ]

    with OLD:
        metrics = train(loaders=LOADERS, callbacks=callbacks).epoch_metrics["valid"]

    first, second = metrics["accuracy"], metrics["accuracy02"]
    assert seen[-1] == first < second
    assert metrics["loader"] == metrics["batch"] == pytest.approx((first + second) / 2, abs=1e-6)
    assert metrics["weighted"] == pytest.approx((3 * first + second) / 4, abs=1e-6)


def test_the_state_of_an_interrupted_loader_keeps_its_names():
    """A checkpoint of an earlier version, in the middle of a loader, can be resumed from."""
    metric = dl.AccuracyCallback("logits", "targets", topk=(1, 3)).metric

    metric.update(torch.eye(4), torch.tensor([0, 1, 2, 0]))

    assert set(metric.state_dict()) == {"accuracy01", "accuracy03", "num"}
    assert metric.compute_key_value() == {"accuracy": 0.75, "accuracy03": metric.compute_key_value()["accuracy03"]}
