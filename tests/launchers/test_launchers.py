"""Launchers, most of them without an engine: what they call, and how each call ends."""

import os
import sys
from contextlib import contextmanager

import pytest

from runnerkit import dl
from runnerkit.engines import WorkerError
from runnerkit.engines.launch.launchers import ExternalLauncher, SpawnLauncher
from runnerkit.engines.process_environment import ProcessEnvironment
from runnerkit.job_process import ThisProcess

PLACE = ProcessEnvironment("torchrun", 1, 1, 2)


class Member:
    """A member of a job that records when it leaves, and knows the cause of every failure but an exit."""

    def __init__(self, events):
        self.events = events

    def gather_rounds(self, values):
        for value in values:
            yield [value]

    def cleanup(self):
        self.events.append("left")

    def stop_watchdog(self):
        self.events.append("stood down")

    def root_cause(self, error):
        return error if isinstance(error, WorkerError) else LookupError("in rank zero")


def fails():
    raise ConnectionError("closed by peer")


@pytest.fixture
def events():
    return []


@pytest.fixture(params=["this process", "started elsewhere"])
def launcher(request, events):
    member = Member(events)
    return ThisProcess(member) if request.param == "this process" else ExternalLauncher(member, PLACE)


def test_a_call_returns_its_result_and_leaves_the_job(launcher, events):
    """A watch stands down before, as nothing has failed."""
    assert launcher.launch(lambda: len(events)) == 0
    assert events[-1] == "left" and events[:-1] == ["stood down"] * isinstance(launcher, ExternalLauncher)


@pytest.mark.parametrize("takes_all", [True, False])
def test_values_arrive_in_rounds_and_the_job_is_left_however_they_end(launcher, events, takes_all):
    """Closing a stream early is not a failure."""
    rounds = launcher.stream(lambda: (each for each in "ab"))

    taken = list(rounds) if takes_all else [next(rounds)]
    rounds.close()

    assert taken == [["a"], ["b"]][: len(taken)]
    assert events[-1] == "left" and events[:-1] == ["stood down"] * isinstance(launcher, ExternalLauncher)


def test_a_job_of_one_process_fails_with_its_own_error(events):
    """The job is left all the same."""
    with pytest.raises(ConnectionError, match="closed by peer"):
        ThisProcess(Member(events)).launch(fails)

    assert events == ["left"]


def test_a_process_started_elsewhere_fails_with_the_cause_of_another(events):
    """The watch does not stand down, so that torchrun ends as well."""
    launcher = ExternalLauncher(Member(events), PLACE)

    with pytest.raises(LookupError, match="in rank zero"):
        launcher.launch(fails)

    assert set(events) == {"left"}


def test_an_exit_in_the_middle_of_a_job_is_an_error(events):
    """The other processes still wait for this one."""
    with pytest.raises(WorkerError, match="rank 1"):
        ExternalLauncher(Member(events), PLACE).launch(lambda: sys.exit(0))


def test_without_a_store_an_error_is_its_own_cause():
    """Horovod's processes have none."""
    launcher = ExternalLauncher(dl.HorovodEngine(2, device="cpu"), PLACE)

    with pytest.raises(ConnectionError, match="closed by peer"):
        launcher.launch(fails)


def variables():
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "OF_ALL", "OF_RANK")}


def test_processes_started_here_get_the_servers_variables(events):
    """The server is there until all have ended."""

    @contextmanager
    def server():
        yield lambda rank: {"OF_RANK": f"own {rank}"}
        events.append("closed")

    launcher = SpawnLauncher(2, variables={"OF_ALL": "all"}, server=server)

    assert launcher.launch(variables) == {"RANK": "0", "WORLD_SIZE": "2", "OF_ALL": "all", "OF_RANK": "own 0"}
    assert list(launcher.stream(lambda: (each for each in [variables()["OF_RANK"]]))) == [["own 0", "own 1"]]
    assert events == ["closed", "closed"]
