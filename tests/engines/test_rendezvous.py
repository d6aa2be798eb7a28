"""Workers of torchrun find those of their own attempt, whatever earlier attempts left behind."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import Mock

import pytest
from torch.distributed import TCPStore

from runnerkit.engines.launch import meeting_point
from runnerkit.engines.launch.meeting_point import Pauses
from runnerkit.engines.launch.rendezvous import join_job
from runnerkit.engines.process_environment import ProcessEnvironment
from tests.free_port import free_port

LEADER = "runnerkit/leader"


@pytest.fixture
def agents():
    """The store of torchrun's agents, which outlives their workers."""
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def join(agents):
    """Return a function that lets a worker join in a thread and returns its future store."""
    threads = ThreadPoolExecutor(8)

    def start(rank, *, world_size=2, timeout_s=30.0):
        place = ProcessEnvironment(
            "torchrun", rank, 0, world_size, None, "127.0.0.1", (agents.port,), is_store_shared=True
        )
        return threads.submit(join_job, place, timedelta(seconds=timeout_s))

    yield start
    threads.shutdown()


def assert_waits(*futures, seconds=0.5):
    time.sleep(seconds)
    assert not any(future.done() for future in futures)


def assert_share(*futures):
    stores = [future.result(30) for future in futures]
    stores[0].set("message", "hello")
    assert all(store.get("message") == b"hello" for store in stores)


def leader_of(agents):
    while not agents.check([LEADER]) or not agents.get(LEADER):
        time.sleep(0.01)
    return agents.get(LEADER)


def test_workers_share_a_store_of_their_own(agents, join):
    """The store is not the agents' store, and keys of dead workers are not in it."""
    first = [join(rank) for rank in range(2)]
    assert_share(*first)
    second = [join(rank) for rank in (1, 0)]

    assert_share(*second)
    assert not agents.check(["message"])
    first[0].result().set("address of a dead one", "x")
    assert not second[1].result().check(["address of a dead one"])


def test_a_dead_leader_is_not_followed(agents, join):
    """Its address is still in the agents' store, until the new leader replaces it."""
    dead = free_port()
    agents.set(LEADER, f"127.0.0.1 {dead} 1")

    follower = join(1)
    assert_waits(follower)
    leader = join(0)

    assert_share(leader, follower)


def test_a_worker_that_died_and_came_again_counts_once(agents, join):
    """Three workers are needed, and rank one joining twice is not enough."""
    leader = join(0, world_size=3)
    leader_of(agents)
    followers = [join(1, world_size=3), join(1, world_size=3)]
    assert_waits(leader, *followers)

    assert_share(leader, *followers, join(2, world_size=3))


def test_a_worker_leaves_a_leader_whose_attempt_is_over(agents, join):
    """The old leader gets an error, and its followers join the new one."""
    old = join(0, world_size=3)
    before = leader_of(agents)
    follower = join(1, world_size=3)
    assert_waits(old, follower)
    new = join(0, world_size=3)
    while leader_of(agents) == before:
        time.sleep(0.01)

    with pytest.raises(ConnectionError, match="another attempt of this job has begun"):
        old.result(30)
    assert_share(new, follower, join(2, world_size=3))


@pytest.mark.parametrize(("rank", "words"), [(0, "rank 0 waits for 1 others, such as rank 1"), (1, "rank 1 waits for")])
def test_waiting_ends_after_the_time_out(join, rank, words):
    """The error names the missing rank and the setting of the timeout."""
    with pytest.raises(TimeoutError, match=words + r".*the engine's timeout_s="):
        join(rank, timeout_s=3).result(30)


def test_a_follower_finds_that_all_have_joined_before_it_finds_no_leader(join, monkeypatch):
    """The two facts are in two stores, and `set` does not wait until its server has read the value."""

    class FarStore(TCPStore):
        """A store in which rank zero's `set` takes effect late, and its `get` still later."""

        def __init__(self, *args, is_master, **kwargs):
            super().__init__(*args, is_master=is_master, **kwargs)
            self._line = ThreadPoolExecutor(1)
            self._delay_s = 0.3 if is_master else 0.0

        def set(self, key, value):
            self._line.submit(time.sleep, self._delay_s)
            self._line.submit(super().set, key, value)

        def get(self, key):
            return self._line.submit(super().get, key).result()

    monkeypatch.setattr("runnerkit.engines.launch.rendezvous.TCPStore", FarStore)

    assert_share(*[join(rank, timeout_s=10) for rank in range(2)])


def test_a_slow_name_server_fails_no_follower(join, monkeypatch):
    """When torch opens a store, it queries the name server: 10 s without an answer, twice in this code."""
    times = []

    def open_store(*args, **kwargs):
        times.append(kwargs.get("timeout", timedelta(minutes=5)))
        return TCPStore(*args, **kwargs)

    monkeypatch.setattr("runnerkit.engines.launch.rendezvous.TCPStore", open_store)
    assert_share(*[join(rank) for rank in range(2)])

    assert len(times) == 4
    assert min(times) > timedelta(seconds=20)


def test_a_wait_ends_late_by_no_more_than_a_tenth_of_it(monkeypatch):
    """Processes that start together meet within milliseconds; long waits poll twenty times a second."""
    slept = []
    monkeypatch.setattr(meeting_point, "time", Mock(wraps=time, sleep=slept.append))
    pauses = Pauses(time.monotonic() + 60)

    for _ in range(100):
        pauses.wait("rank 0 waits")

    assert all(pause <= 0.0011 + sum(slept[:number]) / 10 for number, pause in enumerate(slept))
    assert slept == sorted(slept)
    assert slept[0] == 0.001
    assert slept[-1] == 0.05


def test_the_workers_of_torchs_switch_meet_at_a_port_of_their_own():
    """With TORCH_DISABLE_SHARE_RDZV_TCP_STORE, only rank zero listens at that port."""
    port = free_port()
    places = [ProcessEnvironment("torchrun", rank, rank, 2, None, "127.0.0.1", (port,)) for rank in range(2)]

    with ThreadPoolExecutor(2) as threads:
        futures = [threads.submit(join_job, place, timedelta(seconds=30)) for place in places]

        assert_share(*futures)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_whose_torchrun_has_ended_does_not_wait_for_it(rank):
    """torchrun may be killed while its ranks import torch; they used to wait for timeout_s, then retry."""
    port = free_port()
    place = ProcessEnvironment("torchrun", rank, 0, 2, None, "127.0.0.1", (port,), is_store_shared=True)
    began = time.monotonic()

    with pytest.raises(ConnectionError, match=f"rank {rank} cannot meet .*: torchrun, which .* has ended"):
        join_job(place, timedelta(seconds=20))

    assert time.monotonic() - began < 10


def test_rank_zero_says_that_another_never_came():
    """The other process had the right address, so the error does not mention MASTER_ADDR."""
    port = free_port()
    place = ProcessEnvironment("the launcher", 0, 0, 2, None, "127.0.0.1", (port,))

    with pytest.raises(
        TimeoutError, match=r"rank 0 waits for 1 others, such as rank 1: not started.*timeout_s"
    ) as caught:
        join_job(place, timedelta(seconds=1))

    assert "MASTER_ADDR" not in str(caught.value)
