"""Rendezvous of a job's processes in a store that each of them opens."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from functools import cache
from itertools import count

from torch.distributed import (  # type: ignore[attr-defined]  # public, though not in torch's __all__
    DistError,
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from runnerkit.engines.launch.network import is_loopback, route_to
from runnerkit.engines.process_environment import ProcessEnvironment

_LOOPBACK = "127.0.0.1"
_LEADER = "runnerkit/leader"
_ALL_JOINED = "all joined"
_CONNECT_S = 5
_OPEN = timedelta(seconds=60)  # torch does reverse DNS lookups: 10 s if no name server answers
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.001, 0.05


def open_store(environment: ProcessEnvironment, *, timeout: timedelta) -> Store:
    """Open a store for one process group; every rank must call this, and equally often.

    Raises:
        ValueError: the launcher does not set the address of the rendezvous.
        ConnectionError, TimeoutError: rank zero did not join in time.
    """
    if environment.store is not None:
        return FileStore(environment.store, environment.world_size)
    return _meeting(environment).open(timeout)


class _Meeting:
    """The store of a job, opened when first needed; rank zero's is the server, so it is kept until the process ends."""

    def __init__(self, environment: ProcessEnvironment) -> None:
        self._environment = environment
        self._store: TCPStore | None = None
        self._group_numbers = count(1)

    def open(self, timeout: timedelta) -> Store:
        if self._store is None:
            self._store = join_job(self._environment, timeout)
        self._store.set_timeout(timeout)
        # A script may train several times: a later group must not read what an earlier one left in the store.
        return PrefixStore(f"group {next(self._group_numbers)}", self._store)


@cache
def _meeting(environment: ProcessEnvironment) -> _Meeting:
    return _Meeting(environment)


def join_job(environment: ProcessEnvironment, timeout: timedelta) -> TCPStore:
    """Open the store of the whole job; it is ready as soon as every process has opened it."""
    address, port = environment.address, environment.port
    if address is None or port is None:
        if environment.launcher == "mpirun":
            raise ValueError(
                "MASTER_ADDR or MASTER_PORT is not set, but mpirun started processes on several machines, which need "
                "a meeting point: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 ..."
            )
        raise ValueError(
            f"{environment.launcher} started this process without a meeting point: start with torchrun, use "
            "HorovodEngine, or set MASTER_ADDR and MASTER_PORT to the host and a free port of rank zero"
        )
    where = f"rank {environment.rank} cannot meet the others at {address}:{port} ({environment.launcher})"
    try:
        socket.getaddrinfo(address, port)
    except OSError as error:
        raise ConnectionError(
            f"{where}: {error.strerror}; set MASTER_ADDR to an address of rank 0's machine"
        ) from error
    if environment.is_store_shared and _is_refused(address, port):
        raise ConnectionError(f"{where}: torchrun, which listened there before it started this process, has ended")
    try:
        if environment.is_store_shared:
            return _store_of_attempt(environment, address, port, timeout)
        if environment.rank == 0:
            return _serve(environment, address, port, timeout, environment.world_size)
        host = _LOOPBACK if environment.is_on_one_machine else address
        return TCPStore(host, port, environment.world_size, timeout=timeout)
    except TimeoutError:
        raise
    except (DistError, OSError) as error:
        if "clients joined" in str(error):  # this process serves the store
            raise ConnectionError(
                f"{where}: not all of the {environment.world_size} processes joined within "
                f"{timeout.total_seconds():g} s; one was not started, or has ended and its output says why; "
                "the engine's timeout_s= sets this limit"
            ) from error
        raise ConnectionError(f"{where}: {error}; set MASTER_ADDR and MASTER_PORT to another place") from error


def _is_refused(host: str, port: int) -> bool:
    """Return whether nothing listens there; torch would retry until its timeout."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:  # no answer may only mean that many ranks connect at once
        return isinstance(error, ConnectionRefusedError)
    return False


def _store_of_attempt(environment: ProcessEnvironment, address: str, port: int, timeout: timedelta) -> TCPStore:
    """Open a separate store for this attempt, found through torchrun's.

    Torchrun's store outlives its workers: after a restart, new workers would read the addresses of dead ones from it.
    """
    agents = TCPStore(address, port, is_master=False, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    if environment.rank == 0:
        return _lead(agents, environment, address, port, deadline)
    return _follow(agents, environment, deadline)


def _serve(
    environment: ProcessEnvironment, host: str, port: int, timeout: timedelta, world_size: int | None = None
) -> TCPStore:
    """Serve a store; for a job on one machine only at its loopback, as torch by default listens on every address.

    Args:
        host, port: address of the store; port 0 means any free port.
        world_size: number of processes to wait for; None does not wait.
    """
    descriptor = None
    if environment.is_on_one_machine:
        listener = socket.create_server((_LOOPBACK, port))
        host, port = listener.getsockname()
        descriptor = listener.detach()
    is_awaited = world_size is not None
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=is_awaited,
        master_listen_fd=descriptor,
    )


class Pauses:
    """Growing pauses of one polling loop: each is about a tenth of the time waited so far, to bound the added delay."""

    def __init__(self, deadline: float) -> None:
        self._deadline = deadline
        self._next_s = _FIRST_PAUSE_S

    def wait(self, what: str) -> None:
        """Sleep for the next pause.

        Raises:
            TimeoutError: the deadline has passed; `what` describes which rank waits for which.
        """
        if time.monotonic() > self._deadline:
            raise TimeoutError(f"{what}, and timed out; the engine's timeout_s= sets this limit")
        time.sleep(self._next_s)
        self._next_s = min(1.1 * self._next_s, _LONGEST_PAUSE_S)


def _lead(agents: TCPStore, environment: ProcessEnvironment, address: str, port: int, deadline: float) -> TCPStore:
    own = route_to(address, port)
    # This machine's name may resolve to its loopback here; others reach it by that name.
    store = _serve(environment, address if is_loopback(own) else own, 0, _OPEN)
    leader = f"{store.host} {store.port} {os.getpid()}"
    agents.set(_LEADER, leader)
    pauses = Pauses(deadline)
    missing = set(range(1, environment.world_size))
    while missing := {rank for rank in missing if not store.check([_joined(rank)])}:
        if agents.get(_LEADER).decode() != leader:
            raise ConnectionError("another attempt of this job has begun; torchrun ends or restarts this one")
        pauses.wait(f"rank 0 waits for {len(missing)} others, such as rank {min(missing)}")
    store.set(_ALL_JOINED, "")
    store.get(_ALL_JOINED)  # set is asynchronous, and must complete before the next line takes effect
    agents.set(_LEADER, "")  # ranks of a later attempt must not follow this one
    return store


def _follow(agents: TCPStore, environment: ProcessEnvironment, deadline: float) -> TCPStore:
    pauses = Pauses(deadline)
    what = f"rank {environment.rank} waits for rank 0 at {environment.address}:{environment.port}"
    while True:
        leader = agents.get(_LEADER).decode() if agents.check([_LEADER]) else ""
        if leader:
            try:
                store = _join(leader, agents, environment.rank, deadline, what)
            except DistError:
                store = None  # the leader of a failed attempt; that of this attempt will replace it
            if store is not None:
                return store
        pauses.wait(what)


def _join(leader: str, agents: TCPStore, rank: int, deadline: float, what: str) -> TCPStore | None:
    """Return the leader's store once all ranks have joined it; None if the leader is dead or has been replaced."""
    host, port, _ = leader.split()
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return None  # TCPStore would retry for seconds
    store = TCPStore(host, int(port), is_master=False, timeout=_OPEN, wait_for_workers=False)
    store.set(_joined(rank), "")  # keyed by rank: a restarted process counts once
    pauses = Pauses(deadline)
    while not store.check([_ALL_JOINED]):
        if agents.get(_LEADER).decode() != leader and not store.check([_ALL_JOINED]):
            return None
        pauses.wait(what)
    return store


def _joined(rank: int) -> str:
    return f"joined/{rank}"
