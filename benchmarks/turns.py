"""Turn-taking between processes: only one works at a time, so that the machine's noise affects all equally."""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack

PLACE = "BENCHMARK_TURNS"  # environment variable with the path of the socket through which the process takes turns


class Turns:
    """A process's connection for taking turns with others; without the environment variable it never waits.

    Args:
        one_core: run all processes on the same core, since other programs use the cores unequally.

    Attributes:
        waited: seconds spent in `wait` so far, to subtract from measured times.
    """

    def __init__(self, *, one_core: bool = True) -> None:
        place = os.environ.get(PLACE)
        self.socket = None if place is None else _connected(place)
        if self.socket is not None:
            os.dup(self.socket.fileno())  # keeps the turn during the process's exit, which takes up to a second
        self.one_core = one_core and hasattr(os, "sched_setaffinity")
        self.waited = 0.0

    def wait(self) -> None:
        """End this turn and return when the next one begins."""
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
    """Return a socket through which one process can take turns, even if started by another program."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    return listener


def has_ended(path: str) -> None:
    """Notify the listener at `path` that its process has ended."""
    _connected(path).close()


def let_take_turns(listeners: Sequence[socket.socket], *, timeout_s: float) -> None:
    """Wait until all processes are ready, then wake them one after the other until all have ended.

    A process that ends for any reason closes its socket, which ends its last turn. A process whose turn takes more
    than `timeout_s` seconds gets no further turns.
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
                except OSError:  # killed while it waited
                    working.remove(each)
                    continue
                if not _stands_still(each):
                    working.remove(each)


def _stands_still(process: socket.socket) -> bool:
    """Return True when the process waits for its next turn, or False when it has ended."""
    try:
        return bool(process.recv(1))
    except OSError:
        return False
