"""Tests of the lease: one run at a time writes to a logdir in a store."""

import json
import threading
import time

import pytest

from runnerkit.storage.remote import lease as module
from runnerkit.storage.remote import store as store_module
from runnerkit.storage.remote.lease import Lease, LeaseLost, holder
from runnerkit.storage.remote.manifest import LEASE
from runnerkit.storage.remote.store import Store

BEAT_S, TAKEOVER_S = 0.05, 0.4
OBJECT = f"checkpoints/objects/{'0' * 64}"


@pytest.fixture(autouse=True)
def short_times(monkeypatch):
    """Take over after less than a second."""
    monkeypatch.setattr(module, "BEAT_S", BEAT_S)
    monkeypatch.setattr(module, "TAKEOVER_S", TAKEOVER_S)
    monkeypatch.setattr(store_module, "_FIRST_PAUSE_S", 0.01)


@pytest.fixture
def machine(tmp_path):
    """Return a function that makes the staging folder of another machine; leases in them end with the test."""
    leases = []

    def take(url, name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        leases.append(Lease(Store(url), folder))
        return leases[-1]

    yield take
    for each in leases:
        kill(each)


def kill(lease):
    """End the heartbeat, as a kill of the process does."""
    lease._ended.set()
    lease._thread.join()


def wait_until(condition):
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def content(url):
    return json.loads(Store(url).read(LEASE)[0])


def test_a_run_beats_and_leaves_nothing(url, machine):
    """The count in the lease grows; a clean end deletes it."""
    lease = machine(url, "mine")
    first = content(url)
    wait_until(lambda: content(url)["beat"] >= first["beat"] + 2)
    assert holder(Store(url)) == first["holder"] and first["run"] == lease.run

    lease.release()

    assert Store(url).names() == [] and holder(Store(url)) is None and not lease.is_taken_over


def test_a_second_run_is_refused_while_the_first_beats(url, machine, monkeypatch):
    """The error names the URL and the other run, which continues."""
    monkeypatch.setattr(module, "TAKEOVER_S", 30.0)
    lease = machine(url, "mine")

    with pytest.raises(FileExistsError, match=f"another run is writing to {url}: process .* Wait for it to end"):
        machine(url, "other")

    lease.check()
    lease.announce([])
    assert content(url)["run"] == lease.run


def test_a_run_that_stands_still_is_taken_over_after_a_while(url, machine, caplog):
    """The wait is announced; what the other was uploading is known."""
    dead = machine(url, "dead")
    dead.announce([OBJECT])
    kill(dead)
    began = time.monotonic()

    lease = machine(url, "other")

    assert time.monotonic() - began >= TAKEOVER_S
    assert lease.is_taken_over and lease.unsettled == [OBJECT]
    assert "waiting up to 0.4 s for a sign of life of another run, process" in caplog.text
    assert content(url)["run"] == lease.run and content(url)["unsettled"] == [OBJECT]  # until it is deleted


def test_a_killed_run_on_the_same_machine_is_taken_over_at_once(url, machine, monkeypatch):
    """This process has the lock of its staging folder, so the other has ended."""
    monkeypatch.setattr(module, "TAKEOVER_S", 60.0)
    kill(machine(url, "mine"))
    began = time.monotonic()

    assert machine(url, "mine").is_taken_over

    assert time.monotonic() - began < 30


@pytest.mark.parametrize("notice", [lambda lease: lease.announce([OBJECT]), Lease.check], ids=["announce", "check"])
def test_a_run_that_was_taken_over_notices(url, machine, notice):
    """It was suspended, or the network was gone. From then on it raises, and it does not delete the other's lease."""
    old = machine(url, "old")
    kill(old)
    old.check()  # the other has not taken over yet
    new = machine(url, "new")

    with pytest.raises(LeaseLost, match=f"another run has taken over {url}: process"):
        notice(old)
    with pytest.raises(LeaseLost):
        old.check()
    old.release()

    assert content(url)["run"] == new.run and content(url)["unsettled"] == []
    new.announce([])


@pytest.mark.parametrize("is_there", [True, False], ids=["of another", "deleted"])
def test_the_heartbeat_notices_that_the_lease_is_not_this_runs(url, machine, is_there):
    """Without an upload, too; while it was missing, another run may have come and gone."""
    old = machine(url, "old")
    if is_there:
        Store(url).write(LEASE, json.dumps({"run": "another", "holder": "process 7 on mars", "beat": 1}).encode())
    else:
        Store(url).delete(LEASE)
    old._thread.join(30)

    with pytest.raises(LeaseLost, match="process 7 on mars" if is_there else "one that cannot be read"):
        old.check()

    assert not is_there or content(url)["run"] == "another"


def test_one_of_several_waiting_runs_takes_over(s3, machine, monkeypatch):
    """The others are refused."""
    monkeypatch.setattr(module, "TAKEOVER_S", 4.0)  # the first to take over has this long to beat on a busy machine
    kill(machine(s3.url(), "dead"))
    ends = []

    def take(name):
        try:
            ends.append(machine(s3.url(), name))
        except FileExistsError as error:
            ends.append(error)

    threads = [threading.Thread(target=take, args=(f"machine-{number}",)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    (winner,) = (each for each in ends if isinstance(each, Lease))
    assert len(ends) == 4 and content(s3.url())["run"] == winner.run


def test_a_run_that_ends_while_another_waits_lets_it_in(url, machine, monkeypatch):
    """No takeover is needed."""
    monkeypatch.setattr(module, "TAKEOVER_S", 60.0)
    first = machine(url, "first")
    kill(first)
    timer = threading.Timer(0.1, first.release)
    timer.start()

    second = machine(url, "second")

    timer.join()
    assert not second.is_taken_over and content(url)["run"] == second.run


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff", b'{"run": 3, "unsettled": 7}', b'{"unsettled": [1, null, "../x", "manifest.json"]}'],
)
def test_a_lease_that_cannot_be_read_is_one_that_stands_still(url, machine, data):
    """A user or a fault of the store has damaged it."""
    Store(url).write(LEASE, data)

    lease = machine(url, "mine")

    assert lease.is_taken_over and lease.unsettled == [] and content(url)["run"] == lease.run


def test_a_store_that_is_gone_does_not_end_the_heartbeat(faulty, machine, caplog):
    """It continues when the store is back, and says what happened."""
    lease = machine("faulty://runs/mine", "mine")
    faulty.fail_times(9999, TimeoutError("no answer"))
    wait_until(lambda: "no heartbeat" in caplog.text)
    faulty.fail(lambda operation, path: None)
    before = content("faulty://runs/mine")["beat"]

    wait_until(lambda: content("faulty://runs/mine")["beat"] > before)
    lease.check()
    assert "faulty://runs/mine: no heartbeat: " in caplog.text and "TimeoutError: no answer" in caplog.text


def test_an_unexpected_error_does_not_end_the_heartbeat(faulty, machine):
    """Without it, another run would take over from one that is well."""
    machine("faulty://runs/mine", "mine")
    faulty.fail_times(1, ValueError("an answer that the client does not understand"), operation="write")
    before = content("faulty://runs/mine")["beat"]

    wait_until(lambda: content("faulty://runs/mine")["beat"] >= before + 2)


def test_a_few_faults_at_the_end_do_not_keep_others_waiting(faulty, machine):
    """However short the time between heartbeats is."""
    lease = machine("faulty://runs/mine", "mine")
    faulty.fail_times(7, TimeoutError("no answer"))

    lease.release()

    assert holder(Store("faulty://runs/mine")) is None


def test_the_end_does_not_wait_long_for_a_store_that_is_gone(faulty, machine, monkeypatch, caplog):
    """The run has waited before; the lease ends by itself."""
    monkeypatch.setattr(module, "RELEASE_PATIENCE_S", 0.1)
    lease = machine("faulty://runs/mine", "mine")
    faulty.fail_times(9999, TimeoutError("no answer"))
    began = time.monotonic()

    lease.release()

    assert time.monotonic() - began < 30
    assert "faulty://runs/mine: the next run waits up to 0.4 s: " in caplog.text and "no answer" in caplog.text
