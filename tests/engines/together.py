"""One start of processes for many trainings: a test of several processes costs seconds, most of them imports."""

import socket

from runnerkit.engines.spawn import spawn


def together(fn, *, num_processes=2):
    """Call `fn` in processes that meet for each training of its own; return rank zero's result: one start for many."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return spawn(fn, num_processes=num_processes, variables=variables)
