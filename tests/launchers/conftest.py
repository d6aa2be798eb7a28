"""Fixtures of the launchers' tests."""

from functools import cache

import pytest
from torch import nn

from runnerkit import dl
from tests.launchers.jobs import Jobs, wait_until
from tests.tiny import loader, mlp, quiet, sgd, weights


@pytest.fixture
def jobs(tmp_path):
    """A folder to start commands in; no process of them is left, and that is a law for each test."""
    jobs = Jobs(tmp_path)
    yield jobs
    try:
        wait_until(lambda: not jobs.left(), 10, lambda: f"processes left behind: {jobs.left()}")
    finally:
        jobs.end()


@pytest.fixture(scope="session")
def expected():
    """Weights that plain python ends with, by the number of epochs."""

    @cache
    def train(num_epochs):
        model = mlp()
        dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=sgd(model),
            num_epochs=num_epochs,
            loaders={"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)},
            engine=dl.DistributedDataParallelEngine(2, device="cpu"),
            **quiet(),
        )
        return weights(model)

    return train
