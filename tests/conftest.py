"""Fixtures and hooks of all tests: fixed seeds, few threads, forked processes and a check that none is left behind."""

import contextlib
import gc
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from runnerkit.seeding.generators import set_global_seed
from tests.warm_python import WarmPython

pytest_plugins = ["tests.storage.s3_fixtures"]
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)
# Garbage that owns threads, such as a process group, would wait in a fork for threads that do not exist there.
os.register_at_fork(after_in_child=gc.freeze)
# The tests send both; a shell's `&` starts commands with SIGINT ignored, nohup with SIGHUP ignored.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, _handler)

_GRACE_S = 10  # DataLoader workers check every 5 s that their parent is alive
_WARM = WarmPython()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fork the processes of a test and its fixtures from one that has imported torch, unless it is marked cold."""
    with contextlib.nullcontext() if item.get_closest_marker("cold") else _WARM.patched():
        return (yield)


def pytest_collection_modifyitems(items):
    """Mark the Horovod tests as slow, because Horovod is built from source."""
    for item in items:
        if item.get_closest_marker("horovod"):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Let the garbage collector pass over what the tests' modules hold, which stays until the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """End the process from which the others are forked."""
    _WARM.close()


@pytest.fixture(autouse=True)
def same_random_numbers():
    """Seed each test, so that its random numbers do not depend on the tests before it."""
    set_global_seed(0)


@pytest.fixture(autouse=True)
def empty_memory():
    """Delete what a test, or an example of the docs, wrote to memory:// URLs, which live as long as the process."""
    yield
    if memory := sys.modules.get("fsspec.implementations.memory"):
        memory.MemoryFileSystem.store.clear()
        memory.MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture(autouse=True)
def no_process_is_left():
    """Fail a test that leaves a process behind."""
    before = _children()
    yield
    deadline = time.monotonic() + _GRACE_S
    while (left := _children() - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left, f"processes left behind: {left}"


def _children() -> set[psutil.Process]:
    if _has_none():
        return set()
    alive = set()
    for process in psutil.Process().children(recursive=True):
        try:
            # Python starts one resource tracker for the whole session.
            is_ours = process.pid != _WARM.server_pid and "resource_tracker" not in " ".join(process.cmdline())
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                alive.add(process)
        except psutil.NoSuchProcess:
            continue
    return alive


def _has_none() -> bool:
    """Ask the kernel, within microseconds, whether there are no children, as usual; psutil would read all of /proc."""
    lists = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has just ended
            lists.append(path.read_text())
    return bool(lists) and {int(pid) for pid in " ".join(lists).split()} <= {_WARM.server_pid}
