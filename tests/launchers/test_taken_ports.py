"""A job meets although other programs listen on the first ports that are derived from it, under each launcher."""

import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from runnerkit.engines.launch.rendezvous import join_job
from runnerkit.engines.process_environment import ProcessEnvironment
from tests.free_port import free_ports
from tests.launchers.docs import commands
from tests.launchers.slurm import Slurm, why_not
from tests.launchers.strangers import NUM_STRANGERS, strangers
from tests.launchers.test_one_machine import AS_ROOT, needs_mpirun

AMONG_STRANGERS = """
import runpy
from tests.launchers.strangers import train_among_strangers
train_among_strangers(lambda: runpy.run_path("alone.py", run_name="__main__"))
"""


def joining(ports, *, job="1", rank=0, timeout_s=20):
    place = ProcessEnvironment("srun", rank, rank, 2, None, "127.0.0.1", tuple(ports), job=job)
    return join_job(place, timedelta(seconds=timeout_s))


def test_taken_ports_are_skipped_by_all_ranks():
    """A silent program, a web server, another job's meeting point and another job's store are not the job's."""
    ports = free_ports(NUM_STRANGERS + 1)

    with strangers(ports), ThreadPoolExecutor(2) as threads:
        stores = list(threads.map(lambda rank: joining(ports, rank=rank), range(2)))

    stores[0].set("message", "hello")
    assert stores[1].get("message") == b"hello"


def test_two_jobs_with_the_same_ports_do_not_mix():
    """The ranks of each find their own rank zero, in whatever order they come."""
    ports = free_ports(2)
    ranks = [(job, rank) for rank in (1, 0) for job in "ab"]

    with ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda each: joining(ports, job=each[0], rank=each[1]), ranks)
        stores = dict(zip(ranks, found, strict=True))

    for job in "ab":
        stores[job, 0].set("job", job)
        assert stores[job, 1].get("job").decode() == job


def test_an_error_names_all_ports_and_who_listens():
    """Nothing else would tell the user which program to end."""
    ports = free_ports(NUM_STRANGERS)

    with strangers(ports), pytest.raises(ConnectionError, match="MASTER_PORT") as caught:
        joining(ports)

    for port in ports:  # the strangers listen in this process
        listener = rf"port {port}: Address already in use by [^;]*, process {os.getpid()}\b"
        assert re.search(listener, str(caught.value)), str(caught.value)


def test_a_rank_that_finds_only_strangers_says_what_it_found():
    """After the time-out; it never joins the stranger's store."""
    ports, message = free_ports(NUM_STRANGERS + 1), r"rank 1 waits for rank 0 .*no answer.*another job, somebody's"
    began = time.monotonic()

    with strangers(ports), pytest.raises(TimeoutError, match=message):
        joining(ports, rank=1, timeout_s=1)

    assert time.monotonic() - began < 30


@pytest.fixture
def job_among_strangers(jobs):
    """Make the user's script take the first ports of its own job."""
    (jobs.folder / "train.py").rename(jobs.folder / "alone.py")
    (jobs.folder / "train.py").write_text(AMONG_STRANGERS)
    return jobs


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize("heading", ["Slurm, one machine", "Slurm, several machines"])
def test_srun_among_strangers(job_among_strangers, expected, heading):
    """Tasks of one node listen on its loopback, those of two on all addresses."""
    [command] = commands(heading)

    with Slurm() as slurm:
        job = job_among_strangers.start(command, variables=slurm.environment)
        assert job.wait() == 0, job.output

    job_among_strangers.assert_weights(expected(2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "variables"),
    [
        pytest.param("mpirun on one machine", AS_ROOT, marks=needs_mpirun),
        # Rank zero itself listens at a port that torchrun has found to be free, which may be taken before.
        ("torchrun on one machine", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ],
)
def test_a_launcher_among_strangers(job_among_strangers, expected, heading, variables):
    [command] = commands(heading)

    job = job_among_strangers.start(command, variables=variables)

    assert job.wait() == 0, job.output
    job_among_strangers.assert_weights(expected(2))
