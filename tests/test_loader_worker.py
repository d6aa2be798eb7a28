"""Tests that a data loader's worker process obeys its owner under any start method."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from unittest.mock import Mock

import psutil
import pytest
from torch.utils.data import DataLoader, Dataset

from runnerkit.sampling import loader_worker
from runnerkit.sampling.loader_worker import watch_workers
from tests.alive import is_alive

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="WorkerStart handles signals on Linux only")
OPTIONS = {"capture_output": True, "text": True, "timeout": 120, "check": False}
SCRIPT = textwrap.dedent(
    """
    import os, signal, sys, time
    import psutil
    from torch.utils.data import DataLoader
    from runnerkit.sampling.loader_worker import WorkerStart
    from tests.alive import is_alive

    if __name__ == "__main__":
        workers = {"num_workers": 1, "multiprocessing_context": sys.argv[1]}
        loader = DataLoader(range(8), worker_init_fn=WorkerStart(None), **workers)
        batches = iter(loader)
        next(batches)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
        worker = psutil.Process(batches._workers[0].pid)
        batches._workers[0].terminate()
        deadline = time.monotonic() + 10
        while is_alive(worker):
            if time.monotonic() > deadline:
                worker.kill()
                sys.exit("the worker ignores SIGTERM")
            time.sleep(0.02)
    """
)


@pytest.mark.cold  # the fork server is a separate Python process
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_heeds_the_sigterm_of_its_loaders_process(tmp_path, method):
    """A worker process ends on SIGTERM, also if its parent is a fork server and not the process that uses it."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, str(script), method], env=environment, **OPTIONS)

    assert done.returncode == 0, done.stderr


# Sets the default start method of Python 3.14.
FORK_SERVER = """
from multiprocessing import context
context._default_context._default_context = context._concrete_contexts["forkserver"]
"""
DATA_OF_THE_SCRIPT = textwrap.dedent(
    """
    import multiprocessing
    import torch
    from torch.utils.data import DataLoader, Dataset
    from tests.tiny import train

    class Numbers(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            return torch.full((6,), float(index)), index % 3

    if __name__ == "__main__":
        train(loaders={"train": DataLoader(Numbers(), batch_size=2, num_workers=1)}, num_processes=2)
        print(multiprocessing.get_start_method())
    """
)


@pytest.mark.slow
@pytest.mark.cold  # each rank must import sitecustomize.py
def test_ranks_read_a_data_set_of_the_script_where_a_fork_server_is_the_default(tmp_path):
    """Ranks can use a data set class of the script although a fork server could not import it from its __main__."""
    (tmp_path / "sitecustomize.py").write_text(FORK_SERVER)
    script = tmp_path / "script.py"
    script.write_text(DATA_OF_THE_SCRIPT)

    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.getcwd()}"}
    done = subprocess.run([sys.executable, str(script)], env=environment, **OPTIONS)

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("forkserver\n")  # the user's default is unchanged


class Ends(Dataset):
    """A data set that kills its reader once `may_die` is set, or raises an error of connections itself."""

    def __init__(self, error=None):
        self.error = error
        self.may_die = multiprocessing.Event()

    def __len__(self):
        return 1

    def __getitem__(self, index):
        if self.error is not None:
            raise self.error
        self.may_die.wait()
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_worker_is_named_although_torch_told_it_where_nobody_heard():
    """An error that a signal's handler raises within a finalizer is printed, and lost."""
    data = Ends()
    batches = iter(DataLoader(data, num_workers=1))
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # before the worker ends
    data.may_die.set()

    def first_symptom():
        while is_alive(psutil.Process(batches._workers[0].pid)):
            time.sleep(0.01)
        yield from ()
        raise ConnectionResetError

    try:
        with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid \d+\) is killed"):
            list(watch_workers(first_symptom()))
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_connection_that_the_data_set_lost_is_raised_at_once(monkeypatch):
    """Nobody was killed, so there is nothing to wait for."""
    monkeypatch.setattr(loader_worker, "time", Mock(wraps=time, sleep=lambda _: pytest.fail("waits")))

    batches = iter(DataLoader(Ends(ConnectionResetError("the store is gone")), num_workers=1))
    with pytest.raises(ConnectionResetError, match="the store is gone"):
        list(watch_workers(batches))
    batches._shutdown_workers()  # the error refers to the iterator
