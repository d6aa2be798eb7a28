"""Rendezvous of a job's processes in a store that each of them opens."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
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

from runnerkit.engines.launch.meeting_point import MeetingPoint, Pauses, find_store
from runnerkit.engines.launch.network import LOOPBACK, is_loopback, route_to
from runnerkit.engines.process_environment import ProcessEnvironment

_LEADER = "runnerkit/leader"
_ALL_JOINED = "all joined"
_CONNECT_S = 5
_OPEN = timedelta(seconds=60)  # torch does reverse DNS lookups: 10 s if no name server answers


def open_store(environment: ProcessEnvironment, *, timeout: timedelta) -> Store:
    """Open a store for one process group; every rank must call this, and equally often.

    Raises:
        ValueError: the launcher does not set the address of the rendezvous.
        ConnectionError, TimeoutError: rank zero did not join in time.
    """
    if environment.store is not None:
        return FileStore(environment.store, environment.world_size)
    return _meeting(environment).open(timeout)


class _RankZeroEnded(ConnectionError):
    """Error for a store that is gone; the output of rank zero says why."""


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
    address, ports = environment.address, environment.ports
    if address is None or not ports:
        if environment.launcher == "mpirun":
            raise ValueError(
                "MASTER_ADDR or MASTER_PORT is not set, but mpirun started processes on several machines, which need "
                "a meeting point: mpirun -x MASTER_ADDR=HOST_OF_RANK_0 -x MASTER_PORT=29500 ..."
            )
        raise ValueError(
            f"{environment.launcher} started this process without a meeting point: start with torchrun, use "
            "HorovodEngine, or set MASTER_ADDR and MASTER_PORT to the host and a free port of rank zero"
        )
    where = f"rank {environment.rank} cannot meet the others at {address}:{ports[0]} ({environment.launcher})"
    try:
        socket.getaddrinfo(address, ports[0])
    except OSError as error:
        raise ConnectionError(
            f"{where}: {error.strerror}; set MASTER_ADDR to an address of rank 0's machine"
        ) from error
    if environment.is_store_shared and _is_refused(address, ports[0]):
        raise ConnectionError(f"{where}: torchrun, which listened there before it started this process, has ended")
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        if environment.is_store_shared:
            return _store_of_attempt(environment, address, ports[0], timeout, deadline)
        return _store_at_meeting_point(environment, address, deadline)
    except (TimeoutError, _RankZeroEnded):
        raise
    except (DistError, OSError) as error:
        raise ConnectionError(f"{where}: {error}; set MASTER_ADDR and MASTER_PORT to another place") from error


def _store_at_meeting_point(environment: ProcessEnvironment, address: str, deadline: float) -> TCPStore:
    """Open the store of rank zero, found at the first port of the job that rank zero could listen on."""
    rank, is_local, ports = environment.rank, environment.is_on_one_machine, environment.ports
    job = f"{environment.launcher} {environment.job}".strip() + f" of {environment.world_size} processes"
    if rank == 0:
        store = _serve(environment, address)
        with MeetingPoint(ports, job=job, store_port=store.port, on_loopback=is_local):
            _wait_for_others(store, environment.world_size, deadline)
        return store
    host = LOOPBACK if is_local else address
    what = f"rank {rank} waits for rank 0 at {host}"
    port = find_store(host, ports, job=job, deadline=deadline, what=what)
    try:
        joined = _join(host, port, rank, deadline, what)
    except DistError as error:  # after it has answered
        raise _RankZeroEnded(
            f"rank {rank} cannot meet the others: rank 0, which serves the job's store, has ended"
        ) from error
    assert joined is not None, "only an attempt of torchrun's can be over"
    return joined


def _is_refused(host: str, port: int) -> bool:
    """Return whether nothing listens there; torch would retry until its timeout."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_S).close()
    except OSError as error:  # no answer may only mean that many ranks connect at once
        return isinstance(error, ConnectionRefusedError)
    return False


def _store_of_attempt(
    environment: ProcessEnvironment, address: str, port: int, timeout: timedelta, deadline: float
) -> TCPStore:
    """Open a separate store for this attempt, found through torchrun's.

    Torchrun's store outlives its workers: after a restart, new workers would read the addresses of dead ones from it.
    """
    agents = TCPStore(address, port, is_master=False, timeout=timeout)
    if environment.rank == 0:
        return _lead(agents, environment, address, port, deadline)
    return _follow(agents, environment, deadline)


def _serve(environment: ProcessEnvironment, host: str) -> TCPStore:
    """Serve a store at any free port; for a job on one machine only at its loopback, as torch listens everywhere."""
    port, descriptor = 0, None
    if environment.is_on_one_machine:
        listener = socket.create_server((LOOPBACK, 0))
        host, port = listener.getsockname()
        descriptor = listener.detach()
    return TCPStore(
        host, port, is_master=True, timeout=_OPEN, wait_for_workers=False, master_listen_fd=descriptor
    )  # fmt: skip


def _wait_for_others(
    store: TCPStore, world_size: int, deadline: float, raise_if_over: Callable[[], None] = lambda: None
) -> None:
    """Wait until all other ranks have joined rank zero's store, then tell them."""
    pauses = Pauses(deadline)
    missing = set(range(1, world_size))
    while missing := {rank for rank in missing if not store.check([_joined(rank)])}:
        raise_if_over()
        pauses.wait(
            f"rank 0 waits for {len(missing)} others, such as rank {min(missing)}: not started, slow, or ended, and "
            "then its output says why"
        )
    store.set(_ALL_JOINED, "")
    store.get(_ALL_JOINED)  # set is asynchronous, and must complete before the next line of the caller takes effect


def _lead(agents: TCPStore, environment: ProcessEnvironment, address: str, port: int, deadline: float) -> TCPStore:
    own = route_to(address, port)
    # This machine's name may resolve to its loopback here; others reach it by that name.
    store = _serve(environment, address if is_loopback(own) else own)
    leader = f"{store.host} {store.port} {os.getpid()}"
    agents.set(_LEADER, leader)

    def raise_if_over() -> None:
        if agents.get(_LEADER).decode() != leader:
            raise ConnectionError("another attempt of this job has begun; torchrun ends or restarts this one")

    _wait_for_others(store, environment.world_size, deadline, raise_if_over)
    agents.set(_LEADER, "")  # ranks of a later attempt must not follow this one
    return store


def _follow(agents: TCPStore, environment: ProcessEnvironment, deadline: float) -> TCPStore:
    pauses = Pauses(deadline)
    what = f"rank {environment.rank} waits for rank 0 at {environment.address}:{environment.ports[0]}"
    while True:
        leader = agents.get(_LEADER).decode() if agents.check([_LEADER]) else ""
        if leader:
            try:
                store = _join_leader(leader, agents, environment.rank, deadline, what)
            except DistError:
                store = None  # the leader of a failed attempt; that of this attempt will replace it
            if store is not None:
                return store
        pauses.wait(what)


def _join_leader(leader: str, agents: TCPStore, rank: int, deadline: float, what: str) -> TCPStore | None:
    """Return the leader's store once all ranks have joined it; None if the leader is dead or has been replaced."""
    host, port, _ = leader.split()
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return None  # TCPStore would retry for seconds
    return _join(host, int(port), rank, deadline, what, lambda: agents.get(_LEADER).decode() != leader)


def _join(
    host: str, port: int, rank: int, deadline: float, what: str, is_over: Callable[[], bool] = lambda: False
) -> TCPStore | None:
    """Return the store at a port once all ranks have joined it; None if the attempt is over before that."""
    store = TCPStore(host, port, is_master=False, timeout=_OPEN, wait_for_workers=False)
    store.set(_joined(rank), "")  # keyed by rank: a restarted process counts once
    pauses = Pauses(deadline)
    while not store.check([_ALL_JOINED]):
        if is_over() and not store.check([_ALL_JOINED]):
            return None
        pauses.wait(what)
    return store


def _joined(rank: int) -> str:
    return f"joined/{rank}"
