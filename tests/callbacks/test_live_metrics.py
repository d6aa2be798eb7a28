"""Metrics that progress bars and the dashboard show while a loader runs."""

import numpy as np
import pandas
import pytest
import torch

from runnerkit.callbacks.monitor.live_metrics import LiveMetrics
from tests.callbacks.stand_ins import make_runner
from tests.tiny import mlp, sgd

LOSSES = np.random.default_rng(0).normal(size=120).cumsum()


def run_batches(runner, live, losses, *, every):
    """Read every so many batches as a callback does: before the batch is added to the sums."""
    read = []
    for loss in losses:
        runner.loader_batch_step += 1
        runner.batch_metrics = {"loss": torch.tensor(loss, dtype=torch.float64, requires_grad=True)}
        if runner.loader_batch_step % every == 0:
            read.append(live.read(runner)["loss"])
        runner.loader_pass.means.update({"loss": runner.batch_metrics["loss"].detach()}, batch_size=4)
    return read


def test_loss_is_an_exponential_mean_of_the_batches_before():
    """Read in each batch, the mean equals pandas' `ewm`; in the first batch it is the batch's own value."""
    read = run_batches(make_runner(), LiveMetrics(), LOSSES, every=1)

    expected = pandas.Series(LOSSES).ewm(alpha=0.02, adjust=True).mean()
    np.testing.assert_allclose(read, [LOSSES[0], *expected[:-1]], rtol=1e-12)


def test_batches_between_two_readings_count_too():
    """Read in each tenth batch, the mean of ten batches has the weight of ten."""
    read = run_batches(make_runner(), LiveMetrics(), LOSSES, every=10)

    first, second = LOSSES[:9].mean(), LOSSES[9:19].mean()
    weights = 0.98**10 * (1 - 0.98**9), 1 - 0.98**10
    expected = np.average([first, second], weights=weights)
    np.testing.assert_allclose(read[:2], [first, expected], rtol=1e-12)


def test_whatever_has_no_sum_is_the_latest():
    """Numbers, integers and learning rates are shown as they are; names that begin with "_" are hidden."""
    optimizers = {"a": sgd(mlp(), lr=0.1), "b": sgd(mlp(), lr=torch.tensor(0.5))}
    runner = make_runner(batch_metrics={"b": torch.tensor(3), "a": 2, "_c": 1.0}, optimizer=optimizers)

    assert LiveMetrics().read(runner) == {"b": 3.0, "a": 2.0, "lr_a": 0.1, "lr_b": 0.5}


@pytest.mark.parametrize(("is_train_loader", "expected"), [(True, {"lr": 0.1}), (False, {})])
def test_evaluation_has_no_learning_rate(is_train_loader, expected):
    """Evaluation makes no optimizer steps."""
    runner = make_runner(optimizer=sgd(mlp(), lr=0.1), is_train_loader=is_train_loader)

    assert LiveMetrics().read(runner) == expected
