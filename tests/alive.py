"""Tell whether a process still runs."""

from collections.abc import Iterable
from contextlib import suppress

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Say whether a process still runs: a zombie does not, nor does one that ends while it is asked about."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def still_alive(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that still run."""
    alive = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            alive += [pid] if is_alive(psutil.Process(pid)) else []
    return alive
