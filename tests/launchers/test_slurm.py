"""Training under a real Slurm on this machine: steps and requeued jobs; see test_taken_ports.py for plain srun."""

import json

import pandas as pd
import pytest

from tests.launchers.docs import commands
from tests.launchers.jobs import wait_until
from tests.launchers.slurm import Slurm, why_not

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]
BATCH_JOB = "Slurm, a batch job that resumes after preemption"
SAVING_JOB = "Slurm, a batch job that saves before its time limit"
NUM_EPOCHS = 4


@pytest.fixture
def slurm():
    """Yield a separate cluster for each test."""
    with Slurm() as slurm:
        yield slurm


def test_a_step_is_smaller_than_its_allocation(jobs, slurm):
    """The step's number of tasks counts; the batch script itself is a separate process."""
    (jobs.folder / "job.sh").write_text(
        "#!/bin/bash\n#SBATCH --ntasks=4\n"
        "runnerkit env > batch.json\n"
        "srun --ntasks=2 sh -c 'runnerkit env > step$SLURM_PROCID.json'\n"
    )

    job = jobs.start("sbatch --wait job.sh", variables=slurm.environment)

    assert job.wait() == 0, job.output
    reports = [json.loads((jobs.folder / f"{name}.json").read_text()) for name in ("batch", "step0", "step1")]
    batch, *steps = [each["launcher"] for each in reports]
    assert batch == {"name": "plain python"}
    assert [(each["name"], each["rank"], each["world_size"]) for each in steps] == [("srun", 0, 2), ("srun", 1, 2)]


def submit(jobs, slurm, heading):
    """Submit a batch job of the docs and return its number."""
    script, command, _ = commands(heading)
    (jobs.folder / "job.sh").write_text(jobs.with_arguments(script, num_epochs=NUM_EPOCHS, held_epoch=3))
    job = jobs.start(command, variables=slurm.environment)
    assert job.wait() == 0, job.output
    return int(job.output)


def read(path):
    return path.read_text() if path.exists() else ""


def assert_as_if_never_interrupted(jobs, expected, output):
    """Check that the job was interrupted in the third epoch, restarted, and logged each epoch once."""
    assert output.count("is done") == 2, output
    jobs.assert_weights(expected(NUM_EPOCHS))
    for key in ("train", "valid"):
        logged = pd.read_csv(jobs.logdir / "csv" / f"{key}.csv")
        assert logged["epoch"].tolist() == list(range(1, NUM_EPOCHS + 1))
        pd.testing.assert_frame_equal(logged, expected.logs(NUM_EPOCHS)[key], rtol=0, atol=1e-6)


@pytest.mark.parametrize("how", ["requeue", "preemption"])
def test_a_requeued_job_ends_as_if_it_had_never_been_interrupted(jobs, slurm, expected, how):
    """It is requeued manually, or because a job of a higher partition needs the nodes."""
    job_id = submit(jobs, slurm, BATCH_JOB)
    output = jobs.folder / "job.txt"
    wait_until(lambda: read(output).count("holds") == 2, 60, lambda: read(output))

    if how == "requeue":
        command = commands(BATCH_JOB)[2]
    else:
        command = "srun --partition=high --nodes=2 --exclusive true"
    other = jobs.start(command, variables={**slurm.environment, "JOB": str(job_id)})

    assert other.wait() == 0, other.output
    wait_until(lambda: slurm.facts_of(job_id)["Restarts"] == "1", 60, lambda: slurm.facts_of(job_id))
    jobs.go()
    wait_until(lambda: slurm.facts_of(job_id)["JobState"] == "COMPLETED", 90, lambda: read(output))
    assert_as_if_never_interrupted(jobs, expected, read(output))


def test_a_job_that_is_sent_a_signal_saves_and_puts_itself_back_into_the_queue(jobs, slurm, expected):
    """SIGUSR1 reaches both tasks; both end with exit code 75, and the restart resumes within the epoch."""
    job_id = submit(jobs, slurm, SAVING_JOB)
    output = jobs.folder / "job.txt"
    wait_until(lambda: read(output).count("holds") == 2, 60, lambda: read(output))

    told = jobs.start(commands(SAVING_JOB)[2], variables={**slurm.environment, "JOB": str(job_id)})
    assert told.wait() == 0, told.output
    wait_until(lambda: "SIGUSR1: the run stops" in read(output), 60, lambda: read(output))
    jobs.go()

    wait_until(lambda: slurm.facts_of(job_id)["Restarts"] == "1", 60, lambda: read(output))
    wait_until(lambda: slurm.facts_of(job_id)["JobState"] == "COMPLETED", 90, lambda: read(output))
    assert "SIGUSR1: saved a checkpoint and stopped after step" in read(output)
    assert_as_if_never_interrupted(jobs, expected, read(output))
