"""Fixtures of the launcher tests."""

import pandas as pd
import pytest

from runnerkit import dl
from tests.launchers.hosts import Hosts
from tests.launchers.jobs import Jobs, wait_until
from tests.launchers.ray_jobs import Cluster
from tests.tiny import loader, train, weights


@pytest.fixture
def jobs(tmp_path):
    """Yield a folder in which to start commands; afterwards, none of their processes may be left."""
    jobs = Jobs(tmp_path)
    yield jobs
    try:
        wait_until(lambda: not jobs.left(), 10, lambda: f"processes left behind: {jobs.left()}")
    finally:
        jobs.end()


@pytest.fixture
def hosts(tmp_path):
    """Yield host0 and host1, connected by a network."""
    with Hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def cluster():
    """Return a running cluster of two nodes."""
    cluster = Cluster()
    yield cluster
    cluster.close()


@pytest.fixture
def own_cluster():
    """Return a running cluster of two nodes, for a test that kills one."""
    cluster = Cluster()
    yield cluster
    cluster.close()


class PlainPython:
    """Reference results of the script under plain python, uninterrupted, with two processes."""

    def __init__(self, folder):
        self._folder = folder
        self._weights = {}

    def __call__(self, num_epochs):
        """Return the weights after a number of epochs."""
        if num_epochs not in self._weights:
            engine = dl.DistributedDataParallelEngine(2, device="cpu")
            self._weights[num_epochs] = self._train(engine, num_epochs, self._folder / str(num_epochs))
        return self._weights[num_epochs]

    def logs(self, num_epochs):
        """Return the logged metrics, a frame for each loader."""
        self(num_epochs)
        return self._logs(self._folder / str(num_epochs))

    def alone_after(self, num_together, num_epochs):
        """Return weights and logs if one process continues alone after `num_together` epochs; batch_size stays."""
        logdir = self._folder / f"{num_together} of {num_epochs}"
        self._train(dl.DistributedDataParallelEngine(2, device="cpu"), num_together, logdir)
        return self._train(dl.CPUEngine(), num_epochs, logdir), self._logs(logdir)

    @staticmethod
    def _train(engine, num_epochs, logdir):
        data = {"train": loader(64, 8, shuffle=True), "valid": loader(21, 8)}
        options = {"num_epochs": num_epochs, "loaders": data, "logdir": logdir, "resume": "auto"}
        return weights(train(engine=engine, **options).model)

    @staticmethod
    def _logs(logdir):
        return {key: pd.read_csv(logdir / "csv" / f"{key}.csv") for key in ("train", "valid")}


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """Return the reference results for every launcher."""
    return PlainPython(tmp_path_factory.mktemp("plain"))
