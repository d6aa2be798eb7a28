"""Where the processes of a job find each other: a store that each of them has opened."""

import socket
import time
from datetime import timedelta
from functools import cache

from torch.distributed import (  # type: ignore[attr-defined]  # public, though not in torch's __all__
    DistNetworkError,
    DistStoreError,
    FileStore,
    PrefixStore,
    Store,
    TCPStore,
)

from runnerkit.engines.process_environment import ProcessEnvironment

_LEADER = "runnerkit/leader"
_CONNECT = timedelta(seconds=5)
_POLL_S = 0.1


def open_store(environment: ProcessEnvironment, *, timeout: timedelta) -> Store:
    """Open a store for one process group; every rank must call, and equally often.

    Raises:
        ValueError: the launcher does not say where processes meet.
        TimeoutError: rank zero was not there in time.
    """
    if environment.store is not None:
        return FileStore(environment.store, environment.world_size)
    store = _job_store(environment, timeout)
    # A script may train several times: what an earlier group left in the store must not be read by a later one.
    number = store.add(f"groups of rank {environment.rank}", 1)
    return PrefixStore(f"group {number}", store)


@cache  # a process keeps the store of its job: rank zero's is the server
def _job_store(environment: ProcessEnvironment, timeout: timedelta) -> TCPStore:
    if environment.address is None or environment.port is None:
        raise ValueError(
            f"{environment.launcher} started this process and does not say where processes meet: start with torchrun, "
            "use HorovodEngine, or set MASTER_ADDR and MASTER_PORT to a host and a free port of rank zero"
        )
    if environment.launcher == "torchrun":
        return _store_of_attempt(environment, environment.address, environment.port, timeout)
    try:
        return TCPStore(environment.address, environment.port, environment.world_size, environment.rank == 0, timeout)
    except (DistNetworkError, DistStoreError) as error:
        raise ConnectionError(
            f"rank {environment.rank} cannot meet the others at {environment.address}:{environment.port} "
            f"({environment.launcher}): {error}; MASTER_ADDR and MASTER_PORT say another place"
        ) from error


def _store_of_attempt(environment: ProcessEnvironment, address: str, port: int, timeout: timedelta) -> TCPStore:
    """Open a store of this attempt's own, found through torchrun's.

    Torchrun's store outlives its workers. After a restart they would read from it the addresses of dead ones.
    """
    agents = TCPStore(address, port, is_master=False, timeout=timeout)
    deadline = time.monotonic() + timeout.total_seconds()
    if environment.rank == 0:
        host = _own_address(address, port)
        store = TCPStore(host, 0, is_master=True, timeout=timeout, wait_for_workers=False)
        agents.set(_LEADER, f"{host} {store.port}")
    else:
        store = _follow(agents, deadline, environment)
    store.add("joined", 1)
    if environment.rank == 0:
        while store.add("joined", 0) < environment.world_size:
            _wait(deadline, f"rank 0 waits for {environment.world_size - store.add('joined', 0)} other processes")
        agents.delete_key(_LEADER)  # those of a later attempt must not follow this one
        store.set("all joined", "1")
    store.wait(["all joined"], timeout)
    return store


def _follow(agents: TCPStore, deadline: float, environment: ProcessEnvironment) -> TCPStore:
    while True:
        _wait(deadline, f"rank {environment.rank} waits for rank 0 at {environment.address}:{environment.port}")
        if not agents.check([_LEADER]):
            continue
        host, port = agents.get(_LEADER).decode().split()
        try:
            store = TCPStore(host, int(port), is_master=False, timeout=_CONNECT, wait_for_workers=False)
        except (DistNetworkError, DistStoreError):
            continue  # the leader of an attempt that has failed; this one's will take its place
        store.set_timeout(timedelta(seconds=max(1.0, deadline - time.monotonic())))
        return store


def _wait(deadline: float, what: str) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"{what}, and the time is up; timeout_s= of the engine says how long")
    time.sleep(_POLL_S)


def _own_address(address: str, port: int) -> str:
    """Name this host as others can reach it: by the interface that leads to `address`."""
    family, kind, protocol, _, target = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)  # of a datagram socket: nothing is sent
        own: str = probe.getsockname()[0]
    # A name of this very host may lead to its loopback; the others know it by that name.
    return address if own.startswith("127.") or own == "::1" else own
