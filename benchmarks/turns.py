"""Let processes work in turns: all stand still but one, so that the same noise of the machine falls on everyone."""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack

PLACE = "BENCHMARK_TURNS"  # environment variable: the path of the socket by which the process takes turns


class Turns:
    """The end of a process that takes turns with others; a process that nobody started so never waits.

    Args:
        one_core: whether all are to work on the same core, as others use the cores of a machine unequally.

    Attributes:
        waited: seconds in `wait` so far, not to be counted as work.
    """

    def __init__(self, *, one_core: bool = True) -> None:
        place = os.environ.get(PLACE)
        self.socket = None if place is None else _connected(place)
        if self.socket is not None:
            os.dup(self.socket.fileno())  # the exit of a process, up to a second, is its own turn's too
        self.one_core = one_core and hasattr(os, "sched_setaffinity")
        self.waited = 0.0

    def wait(self) -> None:
        """End the own turn and return at the begin of the next one."""
        if self.socket is None:
            return
        begin = time.perf_counter()
        self.socket.send(b".")
        self.socket.recv(1)
        if self.one_core:
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        self.waited += time.perf_counter() - begin


def _connected(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    return connection


def listen(path: str) -> socket.socket:
    """Return a socket by which one process may take turns, one that others start included."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def has_ended(path: str) -> None:
    """Let those who wait for the process at `path` know that it will not come."""
    _connected(path).close()


def let_take_turns(listeners: Sequence[socket.socket], *, timeout_s: float) -> None:
    """Wait until all are ready, then wake one after the other, until all have ended.

    A process that ends, in whatever way, closes its socket, which ends its last turn; one that works for more than
    `timeout_s` seconds is left out from then on.
    """
    with ExitStack() as stack:
        processes = [stack.enter_context(each.accept()[0]) for each in listeners]
        for each in processes:
            each.settimeout(timeout_s)
        working = [each for each in processes if _stands_still(each)]
        while working:
            for each in [*working]:
                try:
                    each.send(b".")
                except OSError:  # it was killed while it waited
                    working.remove(each)
                    continue
                if not _stands_still(each):
                    working.remove(each)


def _stands_still(process: socket.socket) -> bool:
    """Return once it waits for its next turn, or False once it has ended."""
    try:
        return bool(process.recv(1))
    except OSError:
        return False
