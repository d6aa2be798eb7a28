"""What holds for every test: the same random numbers, few threads, warm processes, and none of them left behind."""

import contextlib
import os
import time
from pathlib import Path

import psutil
import pytest
import torch

from runnerkit.seeding import set_global_seed
from tests.warm_python import WarmPython

os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

_GRACE_S = 10  # DataLoader workers look every 5 s whether their parent is alive
_WARM = WarmPython()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fork the processes of a test, and of its fixtures, from one that has imported torch, unless it is marked cold."""
    with contextlib.nullcontext() if item.get_closest_marker("cold") else _WARM.patched():
        return (yield)


def pytest_collection_modifyitems(items):
    """Horovod is built from source: only the slow tests have it."""
    for item in items:
        if item.get_closest_marker("horovod"):
            item.add_marker(pytest.mark.slow)


def pytest_unconfigure():
    """End the process that others were forked from."""
    _WARM.close()


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Each test draws the same numbers, whichever ran before."""
    set_global_seed(0)


@pytest.fixture(autouse=True)
def no_process_is_left():
    """It ends: a test that leaves a process behind has failed."""
    before = _children()
    yield
    if not _children() - before:  # the usual case, and a matter of microseconds
        return
    deadline = time.monotonic() + _GRACE_S
    while (left := {pid for pid in _children() - before if _is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left behind: {[psutil.Process(pid) for pid in left]}"


def _children() -> set[int]:
    """Return the processes that this one has started, or been given because their parent died."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(pid) for each in lists for pid in each.read_text().split()} - {_WARM.server_pid}


def _is_alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        # The resource tracker is Python's own, one for the whole session.
        return process.status() != psutil.STATUS_ZOMBIE and "resource_tracker" not in " ".join(process.cmdline())
    return False
