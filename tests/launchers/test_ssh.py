"""The documented loop over ssh, on two networked hosts: results, a killed process, a lost connection."""

import os
import signal

import pytest

from tests.launchers import ssh
from tests.launchers.docs import commands
from tests.launchers.hosts import why_not
from tests.launchers.jobs import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
SCRIPT, ONCE, UNTIL_DONE = commands("ssh and torchrun")
NUM_EPOCHS = 4


def write_script(jobs):
    arguments = {"num_epochs": NUM_EPOCHS, "held_epoch": 3}
    (jobs.folder / "launch.sh").write_text(jobs.with_arguments(SCRIPT, **arguments))


def wait_until_held(job):
    """Wait until both processes are within the held epoch; return their pids."""
    return [int(job.wait_for(rf"rank {rank} of 2 on host\d holds with pid (\d+)", 90)[1]) for rank in range(2)]


def test_the_loop_starts_again_after_a_killed_process(jobs, hosts, expected):
    """Both torchruns end, `until` repeats the script, and the results are those of an uninterrupted run."""
    ssh.install_stand_in(jobs, hosts)
    write_script(jobs)
    job = jobs.start(UNTIL_DONE.replace("sleep 10", "sleep 1"), inside=hosts.inside(0))

    os.kill(wait_until_held(job)[1], signal.SIGKILL)
    jobs.go()

    assert job.wait() == 0, job.output
    assert job.output.count("holds with pid") == 4
    jobs.assert_weights(expected(NUM_EPOCHS))
    assert jobs.logged_epochs() == list(range(1, NUM_EPOCHS + 1))


@pytest.mark.skipif(bool(ssh.why_not()), reason=ssh.why_not())
def test_a_lost_connection_lets_both_hosts_save_and_the_next_start_continues(jobs, hosts, expected):
    """The script's Ctrl-C closes the connections; a hang-up within epoch 3 loses no step."""
    write_script(jobs)
    with ssh.Servers(jobs, hosts):
        job = jobs.start(ONCE, inside=hosts.inside(0))
        wait_until_held(job)

        os.killpg(job.process.pid, signal.SIGINT)
        assert job.wait() != 0
        jobs.go()
        wait_until(lambda: not jobs.left(), 60, lambda: f"{jobs.left()}\n{job.output}")

        again = jobs.start(ONCE, inside=hosts.inside(0))
        assert again.wait() == 0, again.output
    assert "holds with pid" not in again.output  # continues after the held step
    jobs.assert_weights(expected(NUM_EPOCHS))
    assert jobs.logged_epochs() == list(range(1, NUM_EPOCHS + 1))
