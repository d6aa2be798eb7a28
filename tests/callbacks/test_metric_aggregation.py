"""Aggregated metrics equal their formula and support gradients."""

import pytest
import torch

from runnerkit.callbacks.metrics.metric_aggregation import MetricAggregationCallback
from tests.callbacks.stand_ins import make_runner

VALUES = {"a": 2.0, "b": 6.0, "c": 10.0}


@pytest.mark.parametrize(
    ("metrics", "reduction", "expected"),
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
def test_value_is_the_formula(metrics, reduction, expected, scope):
    """The formula applies to batches and to loaders, times the multiplier."""
    callback = MetricAggregationCallback("total", metrics, reduction=reduction, scope=scope, multiplier=0.5)
    runner = make_runner(batch_metrics=dict(VALUES), loader_metrics=dict(VALUES))

    callback.on_batch_end(runner)
    callback.on_loader_end(runner)

    found = {"batch": runner.batch_metrics, "loader": runner.loader_metrics}
    assert found.pop(scope) == pytest.approx(VALUES | {"total": expected / 2})
    assert list(found.values()) == [VALUES]


def test_gradients_flow_through_the_total_loss():
    """Each part gets the gradient of its weight."""
    a, b = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    callback = MetricAggregationCallback("loss", {"a": 1.0, "b": 3.0}, reduction="weighted_mean")
    runner = make_runner(batch_metrics={"a": a, "b": b})

    callback.on_batch_end(runner)
    runner.batch_metrics["loss"].backward()

    assert float(runner.batch_metrics["loss"].detach()) == (2 + 9) / 4
    assert (float(a.grad), float(b.grad)) == (0.25, 0.75)


def test_all_metrics_do_not_include_the_result():
    """A metric that handle_batch stored under the result's name is replaced and not added."""
    runner = make_runner(batch_metrics={"total": 100.0, "a": 1.0, "b": 2.0})

    MetricAggregationCallback("total", reduction="sum").on_batch_end(runner)

    assert runner.batch_metrics["total"] == 3.0
