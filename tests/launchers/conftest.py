"""Fixtures of the launchers' tests."""

import pandas as pd
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


class PlainPython:
    """What the script ends with when plain python starts it, nobody interrupts it, and two processes train."""

    def __init__(self, folder):
        self._folder = folder
        self._weights = {}

    def __call__(self, num_epochs):
        """Weights after so many epochs."""
        if num_epochs not in self._weights:
            engine = dl.DistributedDataParallelEngine(2, device="cpu")
            self._weights[num_epochs] = self._train(engine, num_epochs, self._folder / str(num_epochs))
        return self._weights[num_epochs]

    def logs(self, num_epochs):
        """Logged metrics, a frame for each loader."""
        self(num_epochs)
        return self._logs(self._folder / str(num_epochs))

    def alone_after(self, num_together, num_epochs):
        """Weights and logs when one process goes on alone after `num_together` epochs; batch_size stays."""
        logdir = self._folder / f"{num_together} of {num_epochs}"
        self._train(dl.DistributedDataParallelEngine(2, device="cpu"), num_together, logdir)
        return self._train(dl.CPUEngine(), num_epochs, logdir), self._logs(logdir)

    @staticmethod
    def _train(engine, num_epochs, logdir):
        model = mlp()
        dl.SupervisedRunner().train(
            model=model,
            criterion=nn.CrossEntropyLoss(),
            optimizer=sgd(model),
            num_epochs=num_epochs,
            loaders={"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)},
            logdir=logdir,
            resume="auto",
            engine=engine,
            **quiet(),
        )
        return weights(model)

    @staticmethod
    def _logs(logdir):
        return {key: pd.read_csv(logdir / "csv" / f"{key}.csv") for key in ("train", "valid")}


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The reference of every launcher."""
    return PlainPython(tmp_path_factory.mktemp("plain"))
