"""One launch of processes for many trainings: launching takes seconds, most of them for imports."""

import socket

from runnerkit.engines.launch.spawn import spawn


def together(fn, *, num_processes=2):
    """Call `fn` in processes that reconnect for each of its trainings; return rank zero's result."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return spawn(fn, num_processes=num_processes, variables=variables)
