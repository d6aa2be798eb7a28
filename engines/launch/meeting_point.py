"""Port of rank zero's machine where the other ranks of a job ask for its store, and recognize the job."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from runnerkit.engines.launch.network import LOOPBACK

_CONNECT_S, _ANSWER_S = 5.0, 2.0
_WAKE_S = 1.0  # where closing a socket does not wake the thread that waits on it
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _LONGEST_SEARCH_PAUSE_S = 0.001, 0.05, 1.0
_LONGEST_ANSWER = 4096
_IS_LISTENING = "0A"  # a state in /proc/net/tcp


class Pauses:
    """Growing pauses of one polling loop: each is about a tenth of the time waited so far, to bound the added delay."""

    def __init__(self, deadline: float, *, longest_s: float = _LONGEST_PAUSE_S) -> None:
        self._deadline = deadline
        self._longest_s = longest_s
        self._next_s = _FIRST_PAUSE_S

    def wait(self, what: str) -> None:
        """Sleep for the next pause.

        Raises:
            TimeoutError: the deadline has passed; `what` describes which rank waits for which.
        """
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"{what}, and timed out; the engine's timeout_s= sets this limit")
        time.sleep(self._next_s)
        self._next_s = min(1.1 * self._next_s, self._longest_s)


class MeetingPoint:
    """A listener of rank zero that tells each connection the name of the job and the port of the job's store.

    It listens on the first of `ports` that is free, until the block ends.

    Args:
        ports: ports that every rank tries, in this order.
        job: name of the job, the same on every rank.
        store_port: port of the job's store on this machine.
        on_loopback: whether to listen on this machine's loopback only, instead of on all its addresses.

    Raises:
        ConnectionError: no port is free; the message names each one's listener, where the kernel tells it.
    """

    def __init__(self, ports: Sequence[int], *, job: str, store_port: int, on_loopback: bool) -> None:
        self._socket = _listen(ports, on_loopback=on_loopback)
        self._socket.settimeout(_WAKE_S)
        self._answer = json.dumps({"job": job, "store_port": store_port}).encode() + b"\n"
        self._is_over = False
        self._thread = threading.Thread(target=self._serve, name="runnerkit-meeting-point", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread on Linux
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while not self._is_over:
            with contextlib.suppress(OSError):  # a time-out, a connection that is gone, or the end
                connection, _ = self._socket.accept()
                with connection:
                    connection.settimeout(_ANSWER_S)
                    connection.sendall(self._answer)


def find_store(host: str, ports: Sequence[int], *, job: str, deadline: float, what: str) -> int:
    """Return the port of a job's store, once its rank zero answers at one of `ports`.

    Args:
        host: machine of rank zero.
        ports: the ports of rank zero's :class:`MeetingPoint`.
        job: name of the job; what answers with another name is left alone.
        deadline: time of ``time.monotonic`` at which to stop.
        what: which rank waits for which, for the error.

    Raises:
        TimeoutError: rank zero did not answer in time; the message tells what was found at each port.
    """
    pauses = Pauses(deadline, longest_s=_LONGEST_SEARCH_PAUSE_S)
    while True:
        found = []
        for port in ports:
            answer = _ask(host, port)
            if isinstance(answer, dict) and answer["job"] == job:
                return int(answer["store_port"])
            found.append(f"port {port}: {answer if isinstance(answer, str) else 'another job, ' + answer['job']}")
        pauses.wait(f"{what} ({'; '.join(found)})")


def _ask(host: str, port: int) -> dict[str, str] | str:
    """Return the answer of a meeting point, or what is at the port instead."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_S) as connection:
            connection.settimeout(_ANSWER_S)
            with connection.makefile("rb") as lines:
                line = lines.readline(_LONGEST_ANSWER)
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return error.strerror or str(error)
    try:
        answer = json.loads(line)
        return {"job": str(answer["job"]), "store_port": str(int(answer["store_port"]))}
    except (ValueError, KeyError, TypeError):
        return "another program"


def _listen(ports: Sequence[int], *, on_loopback: bool) -> socket.socket:
    taken = []
    for port in ports:
        try:
            if on_loopback:
                return socket.create_server((LOOPBACK, port))
            if socket.has_dualstack_ipv6():
                return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
            return socket.create_server(("", port))
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)  # strerror would repeat the address
            taken.append(f"port {port}: {reason}{_describe_listener(port)}")
    raise ConnectionError(f"cannot listen: {'; '.join(taken)}")


def _describe_listener(port: int) -> str:
    """Return the program that listens on a port of this machine, for an error; empty if the kernel does not tell."""
    inodes = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            rows = [row.split() for row in Path("/proc/net", table).read_text().splitlines()[1:]]
            inodes |= {row[9] for row in rows if row[3] == _IS_LISTENING and int(row[1].rpartition(":")[2], 16) == port}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # the process has ended or is another user's
            match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
            if match and match[1] in inodes:
                process = link.parents[1]
                return f" by {(process / 'comm').read_text().strip()}, process {process.name}"
    return ""
