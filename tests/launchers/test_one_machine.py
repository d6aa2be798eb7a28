"""Plain python, torchrun and mpirun on one machine give the same weights for the same script."""

import json
import shutil

import pytest

from tests.free_port import free_port
from tests.launchers.docs import commands, outputs
from tests.launchers.test_process_environment import SRUN

needs_mpirun = pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")
FAKE_SLURM = SRUN | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}
# By default, mpirun refuses to run as root or with more processes than cores.
AS_ROOT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heading", "variables"),
    [
        ("Plain python", {}),
        ("python -m torch.distributed.launch", {}),  # its former name
        pytest.param("mpirun on one machine", {**AS_ROOT, **FAKE_SLURM}, marks=needs_mpirun),  # within a Slurm job
    ],
)
def test_each_command_gives_the_weights_of_plain_python(jobs, expected, heading, variables):
    """Two processes train, which plain python starts itself. See test_taken_ports.py for more."""
    [command] = commands(heading)

    job = jobs.start(command.replace("6666", str(free_port())), variables=variables)

    assert job.wait() == 0, job.output
    jobs.assert_weights(expected(2), num_ranks=1 if heading == "Plain python" else 2)


@pytest.mark.slow
def test_env_prints_the_place_of_each_process(jobs):
    """`runnerkit env` runs alone, and under the launcher like the script."""
    alone, started = commands("Detected launcher")

    jobs_ = [jobs.start(alone), jobs.start(started)]

    assert [job.wait() for job in jobs_] == [0, 0], jobs_[1].output
    launchers = [sorted(map(place, reports(job.output))) for job in jobs_]
    assert launchers == [[("plain python", None, None)], [("torchrun", 0, 2), ("torchrun", 1, 2)]]


def reports(text):
    """Decode consecutive JSON objects."""
    while text := text.strip():
        report, end = json.JSONDecoder().raw_decode(text)
        yield report
        text = text[end:]


def place(report):
    return tuple(report["launcher"].get(key) for key in ("name", "rank", "world_size"))


@pytest.mark.slow
def test_a_wrong_environment_prints_what_the_page_says(jobs):
    """The error is raised before training."""
    [command], [output] = commands("Invalid environment variables"), outputs("Invalid environment variables")

    job = jobs.start(command)

    assert job.wait() == 1
    assert output in job.output
    assert not jobs.logdir.exists()


TWICE = """
import datetime, os, sys
import torch
import torch.distributed as dist
from runnerkit import dl

sums = []
for timeout_s in (60, 61):
    engine = dl.DistributedDataParallelEngine(device="cpu", timeout_s=timeout_s)
    engine.setup()
    sums.append(engine.reduce(torch.ones(())).item())
    engine.cleanup()
os.write(1, f"{sums}\\n".encode())
"""


@pytest.mark.slow
@needs_mpirun
def test_a_process_joins_a_second_group_with_another_timeout(jobs):
    """Rank zero has one server for the whole job, as a second one could not use the same port."""
    (jobs.folder / "twice.py").write_text(TWICE)

    job = jobs.start("mpirun -np 2 python twice.py", variables=AS_ROOT)

    assert job.wait() == 0, job.output
    assert job.output.count("[2.0, 2.0]") == 2
