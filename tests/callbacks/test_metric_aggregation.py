"""Aggregated metrics equal their formula and support gradients."""

import pytest
import torch

from runnerkit.callbacks.metrics.metric_aggregation import MetricAggregationCallback
from tests.callbacks.stand_ins import make_runner

VALUES = {"a": 2.0, "b": 6.0, "c": 10.0}


@pytest.mark.parametrize(
    ("metrics", "mode", "expected"),
    [
        (["a", "b"], "sum", 8.0),
        (["a", "b"], "mean", 4.0),
        (None, "mean", 6.0),
        ({"a": 1.0, "c": 0.5}, "weighted_sum", 7.0),
        ({"a": 3.0, "c": 1.0}, "weighted_mean", 4.0),
        (["a", "b"], lambda values: values["b"] - values["a"], 4.0),
    ],
)
@pytest.mark.parametrize("scope", ["batch", "loader"])
def test_value_is_the_formula(metrics, mode, expected, scope):
    """The formula applies to batches and to loaders, times the multiplier."""
    callback = MetricAggregationCallback("total", metrics, mode=mode, scope=scope, multiplier=0.5)
    runner = make_runner(batch_metrics=dict(VALUES), loader_metrics=dict(VALUES))

    callback.on_batch_end(runner)
    callback.on_loader_end(runner)

    aggregated, other = (
        (runner.batch_metrics, runner.loader_metrics)
        if scope == "batch"
        else (runner.loader_metrics, runner.batch_metrics)
    )
    assert aggregated == pytest.approx(VALUES | {"total": expected / 2})
    assert other == VALUES


def test_gradients_flow_through_the_total_loss():
    """Each part gets the gradient of its weight."""
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    callback = MetricAggregationCallback("loss", {"a": 1.0, "b": 3.0}, mode="weighted_mean")
    runner = make_runner(batch_metrics={"a": a, "b": b})

    callback.on_batch_end(runner)
    runner.batch_metrics["loss"].backward()

    assert float(runner.batch_metrics["loss"].detach()) == (2 + 9) / 4
    assert (float(a.grad), float(b.grad)) == (0.25, 0.75)


def test_all_metrics_do_not_include_the_result():
    """A metric that handle_batch stored under the result's name is replaced and not added."""
    runner = make_runner(batch_metrics={"total": 100.0, "a": 1.0, "b": 2.0})

    MetricAggregationCallback("total", mode="sum").on_batch_end(runner)

    assert runner.batch_metrics["total"] == 3.0


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"metrics": "a"}, TypeError, "metrics must be a list of names or {name: weight}, got 'a'"),
        ({"metrics": []}, ValueError, "metrics is empty; name at least one, or pass None for all"),
        (
            {"mode": "median"},
            ValueError,
            "mode must be sum, mean, weighted_sum, weighted_mean or a function, got 'median'",
        ),
        (
            {"metrics": ["a"], "mode": "weighted_sum"},
            ValueError,
            r"'weighted_sum' needs metrics={name: weight}, got \['a'\]",
        ),
        ({"metrics": {"a": 1.0}, "mode": "mean"}, ValueError, "'mean' does not use weights; .* mode='weighted_mean'"),
        ({"metrics": {"a": 1, "b": -1}, "mode": "weighted_mean"}, ValueError, "needs weights whose sum is not 0, got"),
        ({"scope": "epoch"}, ValueError, "scope must be 'batch' or 'loader', got 'epoch'"),
    ],
)
def test_bad_argument_is_refused(arguments, error, message):
    """The error is raised before training and says what to pass instead."""
    with pytest.raises(error, match=message):
        MetricAggregationCallback("total", **arguments)


def test_missing_metric_is_named():
    """The error lists the available metrics."""
    callback = MetricAggregationCallback("total", ["a", "z"])

    with pytest.raises(KeyError, match=r"computes 'total' from \['z'\]; batch_metrics has \['a', 'b', 'c'\]"):
        callback.on_batch_end(make_runner(batch_metrics=dict(VALUES)))
