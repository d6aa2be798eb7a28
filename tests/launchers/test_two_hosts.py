"""Training on two networked hosts, also when one is killed or cut off."""

import os
import shlex
import shutil
import signal
import time

import pandas as pd
import pytest

from tests.launchers.docs import PAGE, commands
from tests.launchers.hosts import why_not
from tests.launchers.jobs import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
NUM_EPOCHS = 4
HELD = {"num_epochs": NUM_EPOCHS, "held_epoch": 3}
# Limits that docs/launchers.md promises.
KILLED_S = 30
CUT_OFF_S = 75
GO_ON_S = 60


@pytest.fixture
def start(jobs, hosts):
    """Start the same command on both hosts, as a user would."""

    def start_on_both(heading, *changes, **arguments):
        [command] = commands(heading)
        for old, new in changes:
            assert old in command
            command = command.replace(old, new)
        return [jobs.start(command, inside=hosts.inside(number), **arguments) for number in range(2)]

    return start_on_both


def wait_until_held(nodes, world_size=2):
    """Wait until all workers are within the held epoch; return the pid of each node's worker."""
    return [int(node.wait_for(rf"rank \d of {world_size} on \w+ holds with pid (\d+)", 90)[1]) for node in nodes]


def test_torchrun_on_two_hosts_gives_the_weights_of_plain_python(jobs, start, expected):
    """Each host's own name resolves to its loopback, as on Debian, so the address to listen on is detected."""
    nodes = start("torchrun on several machines")

    assert [node.wait() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    jobs.assert_weights(expected(2))
    assert {"rank 0 of 2 on host0 is done", "rank 1 of 2 on host1 is done"} <= {
        line for node in nodes for line in node.output.splitlines()
    }


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")
def test_mpirun_on_two_hosts_gives_the_weights_of_plain_python(jobs, hosts, expected):
    """One command runs on one host and reaches the other through a stand-in for ssh."""
    [command] = commands("mpirun on several machines")
    remote = jobs.folder / "remote"
    remote.write_text(f'#!/bin/sh\nshift\nexec {shlex.join(hosts.inside(1))} sh -c "$*"\n')
    remote.chmod(0o755)
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

    job = jobs.start(command, inside=hosts.inside(0), variables={"OMPI_MCA_plm_rsh_agent": str(remote), **as_root})

    assert job.wait() == 0, job.output
    jobs.assert_weights(expected(2))
    assert "rank 1 of 2 on host1 is done" in job.output


@pytest.mark.parametrize("killed", [0, 1], ids=["of rank zero", "of rank one"])
def test_killing_a_host_ends_the_job_and_a_new_start_resumes_it(jobs, hosts, start, expected, killed):
    """Either host may be killed; the final results are as if nothing had happened."""
    nodes = start("torchrun on several machines", **HELD)
    wait_until_held(nodes)

    hosts.kill(killed)
    jobs.go()

    assert nodes[1 - killed].wait(KILLED_S) != 0
    wait_until(lambda: not jobs.left(), 10, jobs.left)
    again = start("torchrun on several machines", **HELD)
    assert [node.wait() for node in again] == [0, 0], again[0].output + again[1].output
    jobs.assert_weights(expected(NUM_EPOCHS))
    assert jobs.logged_epochs() == list(range(1, NUM_EPOCHS + 1))


@pytest.mark.parametrize("failing", ["host0", "host1"])
def test_an_exception_on_one_host_is_what_both_end_with(jobs, start, failing):
    """Either host may hold the store; the error has the rank, the batch and the traceback."""
    nodes = start("torchrun on several machines", **HELD, variables={"FAILS_ON": failing})
    wait_until_held(nodes)

    jobs.go()

    assert 0 not in [node.wait(KILLED_S) for node in nodes]
    for node in nodes:
        assert "LookupError: on one host" in node.output
        assert f"in batch 2 of loader 'train', epoch 3, rank {failing[-1]}" in node.output
        assert "closed by peer" not in node.output
    wait_until(lambda: not jobs.left(), 10, jobs.left)


def test_a_silent_cut_ends_both_sides(jobs, hosts, start):
    """Workers end after timeout_s and torchrun soon after, even if it waits for an unreachable store."""
    timeout_s = 20  # also that of the beginning, when both import torch
    nodes = start("torchrun on several machines", **HELD, timeout_s=timeout_s)
    wait_until_held(nodes)

    hosts.cut(1)
    jobs.go()
    begin = time.monotonic()

    codes = [node.wait(timeout_s + CUT_OFF_S - (time.monotonic() - begin)) for node in nodes]
    assert codes[0] != 0
    assert codes[1] == -signal.SIGKILL
    assert "runnerkit: a worker has failed and torchrun" in nodes[1].output
    assert "nothing answers at 10.77.0.1 port 29500" in nodes[1].output
    assert "rank 0 of 2 does not answer" in nodes[1].output
    wait_until(lambda: not jobs.left(), 10, jobs.left)


def test_a_restarted_worker_meets_its_peer_anew(jobs, start, expected):
    """Its peer's worker is restarted too; both ignore the addresses of dead workers and resume from the checkpoint."""
    nodes = start("torchrun on several machines", ("--nnodes=2", "--nnodes=2 --max-restarts=3"), **HELD)
    pids = wait_until_held(nodes)

    os.kill(pids[1], signal.SIGKILL)
    jobs.go()

    assert [node.wait() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    jobs.assert_weights(expected(NUM_EPOCHS))
    assert jobs.logged_epochs() == list(range(1, NUM_EPOCHS + 1))


def test_an_elastic_job_goes_on_without_a_killed_host(jobs, hosts, start, expected):
    """The other one resumes from the checkpoint alone, within the promised time, and finishes.

    Weights and logs are those of two epochs by two processes and two more by one: each epoch is in the logs once.
    """
    nodes = start("torchrun on machines that come and go", **HELD)
    wait_until_held(nodes)

    hosts.kill(1)
    jobs.go()

    nodes[0].wait_for(r"rank 0 of 1 on host0 holds", GO_ON_S)
    assert nodes[0].wait() == 0, nodes[0].output
    assert "rank 0 of 1 on host0 is done" in nodes[0].output
    trained, logs = expected.alone_after(HELD["held_epoch"] - 1, NUM_EPOCHS)
    jobs.assert_weights(trained, num_ranks=1)
    assert jobs.logged_epochs() == list(range(1, NUM_EPOCHS + 1))
    for key, frame in logs.items():
        pd.testing.assert_frame_equal(pd.read_csv(jobs.logdir / "csv" / f"{key}.csv"), frame, rtol=0, atol=1e-6)


def test_the_page_promises_what_is_tested_here():
    """The page's limits are those of this file, to the second."""
    text = " ".join(PAGE.read_text(encoding="utf-8").split())

    assert f"restarted by torchrun, within {KILLED_S} s" in text
    assert f"ends within {CUT_OFF_S} s more" in text
    assert f"resume within {GO_ON_S} s" in text
