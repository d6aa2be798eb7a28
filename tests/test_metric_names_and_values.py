"""Metrics that a user logs arrive as they are, by their own names, or are refused."""

import numpy as np
import pytest
import torch

import runnerkit
from runnerkit import dl
from runnerkit.metrics.means import LoaderMeans
from tests.interrupt import at
from tests.tiny import loader, train

IMAGINARY = {
    "tensor": torch.tensor(1 + 2j),
    "half": torch.tensor(1 + 2j, dtype=torch.complex64).reshape(1),
    "number": 1 + 2j,
    "NumPy number": np.complex64(1 + 2j),
    "NumPy array": np.array(1 + 2j),
}


class Logs(dl.SupervisedRunner):
    def __init__(self, **metrics):
        super().__init__()
        self.metrics = metrics

    def handle_batch(self, batch):
        super().handle_batch(batch)
        self.batch_metrics.update(self.metrics)


def fit(runner, **options):
    return train(runner=runner, **{"loaders": {"train": loader(12, 4), "valid": loader(8, 4)}, **options})


@pytest.mark.parametrize("value", IMAGINARY.values(), ids=IMAGINARY)
@pytest.mark.parametrize("place", ["before the loss", "after the loss", "alone"])
def test_a_complex_metric_is_refused_by_name(value, place):
    """Its imaginary part would be lost silently."""
    loss = {} if place == "alone" else {"loss": torch.tensor(1.0)}
    batch_metrics = {"z": value, **loss} if place == "before the loss" else {**loss, "z": value}

    with pytest.raises(TypeError, match=r"metric 'z' is complex.* abs\(\), or its real and imag as two metrics"):
        LoaderMeans().update(batch_metrics, 4)


@pytest.mark.parametrize("value", IMAGINARY.values(), ids=IMAGINARY)
def test_so_is_one_of_a_loader(value):
    spectrum = at("on_loader_end", lambda runner: runner.loader_metrics.update(z=value), order=100)

    with pytest.raises(TypeError, match="metric 'z' is complex"):
        train(callbacks=[spectrum])


@pytest.mark.parametrize("lr_scale", [None, "linear"])
def test_a_metric_named_as_the_learning_rate_is_kept(tmp_path, lr_scale):
    """Those of steps too; what runnerkit logs beside it stays."""
    loggers = {"csv": dl.CSVLogger(tmp_path, log_batch_metrics=True)}
    runner = fit(Logs(lr=7.0, momentum=8.0), log_every=1, lr_scale=lr_scale, loggers=loggers)

    metrics = runner.epoch_metrics["train"]
    assert (metrics["lr"], metrics["momentum"]) == (7, 8)
    for scope, number in (("loader", 2), ("batch", 3)):
        table = runnerkit.read_metrics(tmp_path, scope=scope)
        assert list(table[table["metric"] == "lr"]["value"]) == [7] * number


@pytest.mark.parametrize("key", ["valid.batch", "valid/easy.batch"])
def test_a_loader_whose_table_would_be_that_of_steps_is_refused(key):
    """read_metrics would take valid.batch.csv for the steps of the loader "valid"."""
    with pytest.raises(ValueError, match=r"table of training steps; give it another key, such as 'valid.*_batch'"):
        fit(Logs(), loaders={"train": loader(12, 4), key: loader(8, 4)})


def test_so_is_a_table(tmp_path):
    logger = dl.CSVLogger(tmp_path)
    logger.setup()

    with pytest.raises(ValueError, match=r"cannot"):
        logger.log_table("seen.batch", {"a": [1]}, step=runnerkit.logger.Step("train", "valid", 1, 1), scope="loader")
