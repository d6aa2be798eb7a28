"""The documented files and commands for Kubernetes, SkyPilot and TorchX, checked by their packages and run locally."""

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launchers import hosts as two_hosts
from tests.launchers.docs import commands, manifests

JOBSET, SKYPILOT, TORCHX = "Kubernetes, a JobSet", "SkyPilot", "TorchX"
NUM_EPOCHS = 4
HELD = {"num_epochs": NUM_EPOCHS, "held_epoch": 3}
needs_hosts = pytest.mark.skipif(bool(two_hosts.why_not()), reason=two_hosts.why_not())


def needs_program(name, package):
    """Skip a test without a program, which may be installed in another environment that is on the PATH."""
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"needs {name} on the PATH: pip install {package}")


def jobset():
    """Return the documented JobSet, its job's spec and its container."""
    [text] = manifests(JOBSET)
    manifest = yaml.safe_load(text)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    return manifest, job, job["template"]["spec"]["containers"][0]


def read_by_the_api(manifest):
    """Return the manifest as read by the models of its API, which raise for a wrong type and drop unknown fields."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api, from PyPI")
    return models.JobsetV1alpha2JobSet.from_dict(manifest).to_dict()


def test_the_jobset_fits_the_api_of_jobset():
    """Every field exists there and has the right type."""
    manifest, *_ = jobset()

    assert read_by_the_api(manifest) == manifest


def test_wrong_fields_do_not_fit_the_api_of_jobset():
    """The check above finds errors deep within the manifest."""
    misspelled, job, _ = jobset()
    job["backoffLimits"] = job.pop("backoffLimit")
    mistyped, job, _ = jobset()
    job["backoffLimit"] = "0"

    assert read_by_the_api(misspelled) != misspelled
    with pytest.raises(ValueError, match="backoffLimit"):
        read_by_the_api(mistyped)


def test_the_jobset_and_its_command_agree():
    """The number of pods, their GPUs, the name of the first one and the time to save are each written twice."""
    manifest, job, container = jobset()
    options = dict(re.findall(r"--([\w-]+)=(\S+)", " ".join(container["command"])))
    name, replicated_job = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]
    volumes = {each["name"] for each in job["template"]["spec"]["volumes"]}

    assert int(options["nnodes"]) == job["completions"] == job["parallelism"]
    assert replicated_job["replicas"] == 1
    assert options["nproc-per-node"] == container["resources"]["limits"]["nvidia.com/gpu"]
    assert options["master-addr"] == f"{name}-{replicated_job['name']}-0-0.{name}"
    assert int(options["shutdown-timeout"]) < job["template"]["spec"]["terminationGracePeriodSeconds"]
    assert {each["name"] for each in container["volumeMounts"]} == volumes


def start_pods(jobs, hosts, **arguments):
    """Start the container's command on both hosts, with the index that an indexed job gives its pod."""
    command = " ".join(jobset()[2]["command"])
    address = "--master-addr=train-node-0-0.train"
    assert command.count(address) == command.count("$(JOB_COMPLETION_INDEX)") == 1
    command = command.replace(address, "--master-addr=host0")
    return [
        jobs.start(
            f"exec {command.replace('$(JOB_COMPLETION_INDEX)', str(number))}", inside=hosts.inside(number), **arguments
        )
        for number in range(2)
    ]


@pytest.mark.slow
@needs_hosts
def test_an_evicted_pod_lets_all_save_and_the_next_start_continues(jobs, hosts, expected):
    """SIGTERM reaches the torchrun of one pod; both pods fail, whereupon JobSet starts both again."""
    pods = start_pods(jobs, hosts, **HELD)
    for pod in pods:
        pod.wait_for("holds with pid", 90)

    pods[1].process.send_signal(signal.SIGTERM)
    pods[1].wait_for("SIGTERM: the run stops", 60)  # else the last epoch could be over first
    jobs.go()

    assert [pod.wait(60) for pod in pods] == [1, 1], pods[0].output + pods[1].output
    again = start_pods(jobs, hosts, **HELD)
    assert [pod.wait() for pod in again] == [0, 0], again[0].output + again[1].output
    assert "holds with pid" not in again[0].output + again[1].output  # continues after the held step
    jobs.assert_weights(expected(NUM_EPOCHS))
    assert jobs.logged_epochs() == list(range(1, NUM_EPOCHS + 1))


PARSE = """
import json, sys
import sky

task = sky.Task.from_yaml_str(sys.stdin.read())
[resources] = task.resources
facts = [task.num_nodes, task.run, resources.accelerators, resources.use_spot, resources.job_recovery]
print("FACTS", json.dumps(facts))
"""


def parsed_by_skypilot(text, home):
    """Parse a task in SkyPilot's own environment; its import takes up to minutes on a busy machine."""
    python = Path(shutil.which("sky")).with_name("python")
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": ""}
    return subprocess.run(
        [python, "-c", PARSE], input=text, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@needs_program("sky", "skypilot")
def test_skypilot_parses_the_task(tmp_path):
    """Its parser reads the nodes, the command and the restarts, and refuses a misspelled field."""
    [text] = manifests(SKYPILOT)

    right, wrong = (parsed_by_skypilot(each, tmp_path) for each in (text, text.replace("num_nodes", "num_node")))

    assert right.returncode == 0, right.stderr
    num_nodes, run, accelerators, is_spot, recovery = json.loads(right.stdout.partition("FACTS ")[2])
    assert (num_nodes, run, accelerators, is_spot) == (2, yaml.safe_load(text)["run"], {"H100": 1}, True)
    assert recovery["max_restarts_on_errors"] == 3
    assert wrong.returncode != 0
    assert "num_node" in wrong.stderr


@pytest.mark.slow
@needs_hosts
def test_skypilots_command_gives_the_weights_of_plain_python(jobs, hosts, expected):
    """Each host has the variables that SkyPilot sets; the first address is that of rank zero."""
    command = yaml.safe_load(manifests(SKYPILOT)[0])["run"]
    variables = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
    variables["SKYPILOT_NODE_IPS"] = "10.77.0.1\n10.77.0.2"

    nodes = [
        jobs.start(command, inside=hosts.inside(rank), variables={**variables, "SKYPILOT_NODE_RANK": str(rank)})
        for rank in range(2)
    ]

    assert [node.wait() for node in nodes] == [0, 0], nodes[0].output + nodes[1].output
    jobs.assert_weights(expected(2))
    assert "rank 0 of 2 on host0 is done" in nodes[0].output


@pytest.mark.slow
@needs_program("torchx", "torchx")
def test_torchx_on_one_machine_gives_the_weights_of_plain_python(jobs, expected):
    """Its component dist.ddp starts torchrun, which starts two processes."""
    local, _ = commands(TORCHX)

    job = jobs.start(local)

    assert job.wait() == 0, job.output
    jobs.assert_weights(expected(2))


@pytest.mark.slow
@needs_program("torchx", "torchx")
def test_torchx_writes_a_slurm_job_that_requeues_itself(jobs):
    """Only a dry run: without Slurm's accounting, TorchX cannot follow the job that it submitted."""
    _, command = commands(TORCHX)

    job = jobs.start(command.replace("--scheduler slurm", "--scheduler slurm --dryrun"))

    assert job.wait() == 0, job.output
    assert "--nnodes 2 --nproc_per_node 1" in job.output
    assert "TORCHX_MAX_RETRIES=3" in job.output
    assert 'scontrol requeue "$SLURM_JOB_ID"' in job.output
