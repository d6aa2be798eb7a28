"""Tell whether a process still runs."""

import psutil


def is_alive(process: psutil.Process) -> bool:
    """Say whether a process still runs: a zombie does not, nor does one that ends while it is asked about."""
    try:
        return process.is_running() and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
