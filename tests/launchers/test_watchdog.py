"""The watchdog that kills torchrun's agent when its machine is cut off, and cases in which it must not."""

import contextlib
import socket
import sys
import textwrap
import time

import psutil
import pytest

from tests.alive import is_alive
from tests.launchers.jobs import ROOT, wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, which only Linux has"),
]
QUIET_S = 1.0
# A stand-in for torchrun: one connection, one worker in a separate session, then the test's own code.
AGENT = textwrap.dedent(
    """
    import os, socket, subprocess, sys, time
    connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    start = lambda *words: subprocess.Popen([sys.executable, "worker.py", *words], start_new_session=True)
    worker = start(sys.argv[2])
    os.write(1, b"agent is there\\n")
    {then}
    """
)
WORKER = textwrap.dedent(
    f"""
    import os, sys, time
    time.sleep(0.5)  # until the other workers are there
    if sys.argv[1:] != ["sleeps"]:
        sys.path.insert(0, {str(ROOT / "engines" / "failures")!r})  # it imports no package: torch would take seconds
        from watchdog import AgentWatch
        watch = AgentWatch(quiet_s={QUIET_S})
        os.write(1, f"watched by {{watch._process.pid}}\\n".encode())
        time.sleep(3)  # a watchdog that is there sees all workers
    if sys.argv[1:] == ["succeeds"]:
        watch.stop()
    if sys.argv[1:] in (["succeeds"], ["sleeps"]):
        time.sleep(300)
    os._exit(1)
    """
)
STUCK = "connection.recv(1)"
RUNS = "while True: time.sleep(0.1)"


@pytest.fixture
def server():
    """Yield a listener that never accepts: its queue holds the agent's connection and a few more."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        yield server


@pytest.fixture
def start(jobs, server):
    """Return a function that starts a stand-in agent and its watchdog; `is_cut_off` stops further answers."""

    def start_agent(worker, then, *, is_cut_off=True):
        (jobs.folder / "worker.py").write_text(WORKER)
        (jobs.folder / "agent.py").write_text(AGENT.format(then=then))
        server.listen(0 if is_cut_off else 100)
        job = jobs.start(f"exec python agent.py {server.getsockname()[1]} {worker}")
        job.wait_for("agent is there")
        watchdog = psutil.Process(int(job.wait_for(r"watched by (\d+)")[1]))
        if is_cut_off:
            fill(server)
        return job, watchdog

    yield start_agent
    jobs.end()


def fill(server):
    """Fill the remaining places in the queue, so that the kernel drops later connections."""
    for _ in range(3):
        with contextlib.suppress(TimeoutError), socket.socket() as client:
            client.settimeout(0.2)
            client.connect(server.getsockname())


def assert_lives(process, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert is_alive(process)
        time.sleep(0.1)


def test_an_agent_that_is_stuck_and_cut_off_is_ended_with_its_workers(jobs, start):
    """It ends within the quiet time plus one connection attempt, with the reason, and no process is left."""
    agent, _ = start("fails", f"start('sleeps'); {STUCK}")

    assert agent.wait(40) == -9
    assert "nothing answers at 127.0.0.1 port" in agent.output
    wait_until(lambda: not jobs.left(), 10, jobs.left)


@pytest.mark.parametrize(("then", "is_cut_off"), [(STUCK, False), (RUNS, True)], ids=["its peer answers", "it runs"])
def test_an_agent_that_waits_for_a_peer_who_answers_or_runs_is_left_alone(start, then, is_cut_off):
    """It may wait long for other machines to return, and notices a lost connection by itself while it runs."""
    agent, watchdog = start("fails", then, is_cut_off=is_cut_off)

    assert_lives(watchdog, 5 * QUIET_S)
    assert agent.process.poll() is None


@pytest.mark.parametrize(
    ("worker", "then", "ends"),
    [
        ("succeeds", STUCK, False),
        ("fails", f"worker.wait(); start('sleeps'); {STUCK}", False),
        ("fails", "worker.wait()", True),
    ],
    ids=["the worker succeeded", "the agent started new workers", "the agent ended"],
)
def test_the_watchdog_goes_when_it_is_not_needed(start, worker, then, ends):
    """It does not touch the agent and does not stay behind."""
    agent, watchdog = start(worker, then)

    wait_until(lambda: not is_alive(watchdog), 20, lambda: agent.output)
    assert agent.wait(10) == 0 if ends else agent.process.poll() is None
    assert "nobody answers" not in agent.output
