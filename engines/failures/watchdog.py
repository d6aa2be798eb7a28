"""A small process beside torchrun's agent that kills it when this machine is cut off from the others.

When the network fails silently, workers fail after their timeout. The agent blocks inside a system call on a store
that it cannot reach, for a quarter of an hour or forever; it notices neither its workers' deaths nor SIGTERM.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import IPv6Address, ip_address
from pathlib import Path

QUIET_S = 30.0
_POLL_S = 0.5
_CONNECT_S = 5.0
_DONE = b"done"
_ESTABLISHED, _LISTENS = "01", "0A"  # states in /proc/net/tcp

Address = tuple[str, int]


class AgentWatch:
    """Handle in the worker: starts the watchdog process, and stops it after a successful run.

    Args:
        quiet_s: seconds for which the agent must be stuck before it is killed.
    """

    def __init__(self, *, quiet_s: float = QUIET_S) -> None:
        # torchrun makes each worker, or the shell script around it, a session leader.
        agent = _stat(os.getsid(0))[1]
        # Run by path and without any package: 10 MB and 20 ms, whereas importing torch costs 300 MB and seconds.
        command = [sys.executable, "-I", "-S", __file__, str(agent), str(quiet_s)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    def stop(self) -> None:
        """Stop the watchdog process; safe to call twice."""
        if self._process.returncode is None:
            self._process.communicate(_DONE)


def is_needed() -> bool:
    """Return whether torchrun started this process as the first of its machine, in a job of several machines.

    Where it cannot be watched, that is on other systems than Linux, a warning says so.
    """
    is_agent_far = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    is_first = is_agent_far and os.environ.get("LOCAL_RANK") == "0"
    if is_first and sys.platform != "linux":
        import logging  # the watchdog process itself does without it

        logging.getLogger(__name__).warning(
            "torchrun is not watched, which needs Linux: if this machine is cut off from the others, end it yourself"
        )
        return False
    return is_first


def main(agent: int, quiet_s: float) -> None:
    """Wait until the worker ends; if it failed, until the agent ends, starts new workers, or is found to be cut off."""
    since = _stat(agent)[2]
    workers = set(_children(agent))
    if sys.stdin.buffer.read() == _DONE:
        return
    switches, quiet_since = "", time.monotonic()
    while _is_running(agent, since) and not set(_children(agent)) - workers:
        time.sleep(_POLL_S)
        with suppress(OSError):  # the agent may end in between
            if switches != (switches := _context_switches(agent)):
                quiet_since = time.monotonic()  # not stuck: torchrun polls its workers or the others every second
            elif time.monotonic() - quiet_since > quiet_s:
                quiet_since = time.monotonic()
                peers = sorted(set(_peers(agent)))
                if peers and not any(map(_answers, peers)) and switches == _context_switches(agent):
                    _end(agent, peers)


def _end(agent: int, peers: list[Address]) -> None:
    places = ", ".join(f"{host} port {port}" for host, port in peers)
    sys.stderr.write(
        f"runnerkit: a worker has failed and torchrun (pid {agent}) does not notice, as nothing answers at {places}: "
        "this machine is cut off, so torchrun is killed\n"
    )
    os.kill(agent, signal.SIGSTOP)  # so that it does not start new workers meanwhile
    for worker in _children(agent):
        with suppress(OSError):  # it has just ended
            if os.getpgid(worker) == worker:
                os.killpg(worker, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)


def _is_running(pid: int, since: int) -> bool:
    """Return whether process `pid` is alive and started at `since`."""
    try:
        state, _, started = _stat(pid)
    except OSError:
        return False
    return started == since and state not in "ZX"


def _stat(pid: int) -> tuple[str, int, int]:
    """Return a process's state, its parent's id, and its start time in clock ticks."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name before it may contain anything
    return fields[0], int(fields[1]), int(fields[19])


def _children(pid: int) -> Iterator[int]:
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and _stat(int(entry))[1] == pid:
                yield int(entry)
        except OSError:
            continue  # it has just ended


def _context_switches(pid: int) -> str:
    """Return the main thread's context switch counters, which do not change while it is stuck."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return " ".join(line for line in lines if "ctxt_switches" in line)


def _peers(pid: int) -> Iterator[Address]:
    """Yield the addresses that a process has connected to, without its incoming connections."""
    links = (os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd"))
    sockets = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    rows = [
        line.split()
        for table in ("tcp", "tcp6")
        if (path := Path(f"/proc/{pid}/net/{table}")).exists()
        for line in path.read_text().splitlines()[1:]
    ]
    rows = [row for row in rows if row[9] in sockets]
    served = {_address(row[1])[1] for row in rows if row[3] == _LISTENS}
    for row in rows:
        if row[3] == _ESTABLISHED and _address(row[1])[1] not in served:
            yield _address(row[2])


def _address(text: str) -> Address:
    """Decode an address of /proc/net/tcp: 32-bit words in native byte order.

    >>> _address("0100007F:7530") if sys.byteorder == "little" else ("127.0.0.1", 30000)
    ('127.0.0.1', 30000)
    """
    host, port = text.split(":")
    words = (int(host[start : start + 8], 16) for start in range(0, len(host), 8))
    address = ip_address(b"".join(word.to_bytes(4, sys.byteorder) for word in words))
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address), int(port, 16)


def _answers(address: Address) -> bool:
    try:
        with socket.create_connection(address, timeout=_CONNECT_S):
            return True
    except ConnectionRefusedError:
        return True  # the machine is reachable
    except OSError:
        return False


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
