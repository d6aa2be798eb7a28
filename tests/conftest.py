"""What holds for every test: the same random numbers, few threads, and no process left behind."""

import os
import time

import psutil
import pytest
import torch

from runnerkit.seeding import set_global_seed

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

_GRACE_S = 10  # DataLoader workers look every 5 s whether their parent is alive


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Each test draws the same numbers, whichever ran before."""
    set_global_seed(0)


@pytest.fixture(autouse=True)
def no_process_is_left():
    """It ends: a test that leaves a process behind has failed."""
    before = _children()
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := _children() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"


def _children() -> set[psutil.Process]:
    alive = set()
    for process in psutil.Process().children(recursive=True):
        try:
            # The resource tracker is Python's own, one for the whole session.
            if process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline()):
                alive.add(process)
        except psutil.NoSuchProcess:
            continue
    return alive
