"""One launch of processes for many trainings: launching takes seconds, most of them for imports."""

from runnerkit.engines.launch.spawn import spawn
from tests.free_port import free_port


def together(fn, *, num_processes=2):
    """Call `fn` in processes that reconnect for each of its trainings; return rank zero's result."""
    port = free_port()
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return spawn(fn, num_processes=num_processes, variables=variables)
