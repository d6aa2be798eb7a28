"""The launchers' environment variables, and errors for wrong ones."""

import json
import os
import zlib

import pytest

from runnerkit import dl
from runnerkit.commands.cli import main
from runnerkit.engines.process_environment import STORE_VARIABLE, ProcessEnvironment, first_host

TORCH = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "host0", "MASTER_PORT": "29500"}
TORCHRUN = {**TORCH, "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True"}
NAMES_OF_MPI = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "LOCAL_RANK", "SIZE", "LOCAL_SIZE")]
MPIRUN = {**dict(zip(NAMES_OF_MPI, "3144", strict=True)), "PMIX_NAMESPACE": "3141"}
STEP = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-08]"}
SRUN = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", **STEP}
HOROVODRUN = {"HOROVOD_RANK": "3", "HOROVOD_LOCAL_RANK": "1", "HOROVOD_SIZE": "4"}
# As set by Horovod 0.28.1 with --mpi on Open MPI: options for mpirun, but no Horovod variables.
HOROVODRUN_MPI = {**MPIRUN, "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib", "OMPI_MCA_orte_tag_output": "1"}
PREFIXES = (
    "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMIX_", "HOROVOD_",
)  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    """Set these variables, and unset all others of any launcher."""
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)

    def set_variables(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("variables", "launcher", "address"),
    [
        (TORCHRUN, "torchrun", "host0"),
        (TORCH, "the launcher", "host0"),
        (MPIRUN, "mpirun", "127.0.0.1"),
        ({**MPIRUN, "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "^openib"}, "mpirun", "127.0.0.1"),
        (HOROVODRUN_MPI, "horovodrun", "127.0.0.1"),
        (SRUN, "srun", "gpu07"),
        ({**SRUN, **MPIRUN}, "mpirun", "127.0.0.1"),
        ({**SRUN, **TORCHRUN}, "torchrun", "host0"),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "mpirun", "a"),
        ({**SRUN, "MASTER_ADDR": "10.0.0.1"}, "srun", "10.0.0.1"),
        ({**without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST": "n[1-2]"}, "srun", "n1"),
    ],
)
def test_each_launcher_is_detected(environment, variables, launcher, address):
    """The innermost launcher counts; rank and meeting point are read, with the same port in every process."""
    environment(variables)

    place = ProcessEnvironment.read()

    assert (place.launcher, place.rank, place.local_rank, place.world_size) == (launcher, 3, 1, 4)
    assert place.address == address
    assert len(set(place.ports)) == len(place.ports) > 0
    assert all(0 < port < 32768 for port in place.ports)
    assert place.store is None


ONE_NODE = {"SLURM_STEP_NUM_NODES": "1"}
ELSEWHERE = {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "is_on_one_machine"),
    [
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, True),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, False),
        ({**SRUN, **ONE_NODE, "SLURM_STEP_NUM_TASKS": "1", **TORCHRUN, "LOCAL_WORLD_SIZE": "2"}, False),
        ({**SRUN, **ONE_NODE, "SLURM_STEP_NUM_TASKS": "2", **TORCH}, False),
        ({**SRUN, **ONE_NODE, **TORCH}, True),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "1", **TORCHRUN}, False),
        ({**MPIRUN, **TORCH}, True),
        ({**SRUN, **ONE_NODE}, True),
        ({**SRUN, "SLURM_STEP_NUM_NODES": "2"}, False),
        ({**SRUN, **ONE_NODE, **MPIRUN}, True),
        ({**SRUN, **ONE_NODE, **MPIRUN, **ELSEWHERE, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
    ],
    ids=[
        "torchrun", "torchrun on two machines", "two torchruns in a step each", "variables of torch in two steps",
        "variables of torch in a step", "torchruns within an mpirun each", "variables of torch within mpirun",
        "srun", "srun on two machines", "mpirun in a step", "mpirun across steps",
    ],
)  # fmt: skip
def test_the_launchers_own_variables_tell_that_the_job_is_on_one_machine(environment, variables, is_on_one_machine):
    """`srun -N1 torchrun --nnodes=2`, once per machine, is a job on two machines in steps of one."""
    environment(variables)

    assert ProcessEnvironment.read().is_on_one_machine is is_on_one_machine


def test_processes_that_runnerkit_spawned_meet_in_a_file_or_at_an_address(environment):
    """The launcher is known in both cases."""
    environment({**without(TORCH, "MASTER_ADDR", "MASTER_PORT"), STORE_VARIABLE: "/a/file"})
    by_file = ProcessEnvironment.read()
    environment({**TORCH, STORE_VARIABLE: ""})
    by_address = ProcessEnvironment.read()

    assert (by_file.launcher, by_file.store, by_file.address) == ("runnerkit", "/a/file", None)
    assert (by_address.launcher, by_address.store, by_address.address) == ("runnerkit", None, "host0")


def test_torchrun_within_a_job_of_our_own_has_its_own_meeting_point(environment):
    """The rendezvous file of the surrounding job is not used."""
    environment({**TORCHRUN, STORE_VARIABLE: "/a/file"})

    place = ProcessEnvironment.read()

    assert (place.launcher, place.store, place.is_store_shared) == ("torchrun", None, True)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"MASTER_ADDR": "host0", "MASTER_PORT": "29500"},
        without(SRUN, "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"),
        {**SRUN, "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1"},
    ],
    ids=["nothing", "an address only", "batch script without srun", "srun of one task", "shell of salloc"],
)
def test_a_plain_process_is_no_job(environment, variables):
    """The engine starts its processes itself."""
    environment(variables)

    assert ProcessEnvironment.read() is None


def test_a_requeued_job_meets_at_another_port(environment):
    """Remaining processes of its previous run may hold the old port; all tasks of one run agree on it."""
    environment(SRUN)
    first = ProcessEnvironment.read().ports
    environment({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    other_task = ProcessEnvironment.read().ports
    environment({"SLURM_RESTART_COUNT": "1"})
    second = ProcessEnvironment.read().ports

    assert first == other_task
    assert set(first).isdisjoint(second)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set; expected an integer"),
        (without(TORCH, "RANK"), "RANK is not set; expected an integer"),
        ({**TORCH, "RANK": ""}, "RANK is ''; expected an integer"),
        ({**TORCH, "LOCAL_RANK": "²"}, "LOCAL_RANK is '²'; expected an integer"),
        ({**TORCH, "RANK": "4"}, r"RANK=4 must be in \[0, WORLD_SIZE\), and WORLD_SIZE=4; the launcher sets both"),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, r"LOCAL_RANK=-1 must be in \[0, WORLD_SIZE\), and WORLD_SIZE=4; torchrun"),
        (without(TORCH, "MASTER_ADDR"), "RANK is '3' but MASTER_ADDR is not set; expected where rank 0 listens"),
        (without(TORCH, "MASTER_PORT"), "RANK is '3' but MASTER_PORT is not set; expected where rank 0 listens"),
        ({**TORCH, "MASTER_PORT": "http"}, "MASTER_PORT is 'http'; expected an integer"),
        ({**TORCH, "MASTER_PORT": "70000"}, "MASTER_PORT is 70000; expected a free port .* 1 to 65535"),
        ({**TORCH, "MASTER_ADDR": " "}, "MASTER_ADDR is ' '; expected the host name or IP address"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE is 'two'; .* which a launcher such as torchrun sets"),
        (without(MPIRUN, "OMPI_COMM_WORLD_SIZE"), "OMPI_COMM_WORLD_SIZE is not set; .* which mpirun sets"),
        ({**SRUN, "SLURM_PROCID": "x"}, "SLURM_PROCID is 'x'; expected an integer, which Slurm's srun sets"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS is 'many'; .* which Slurm's srun sets"),
        ({**HOROVODRUN, "HOROVOD_SIZE": ""}, "HOROVOD_SIZE is ''; expected an integer, which horovodrun sets"),
        ({**SRUN, "SLURM_PROCID": "4"}, r"SLURM_PROCID=4 must be in \[0, SLURM_STEP_NUM_TASKS\), and SLURM_STEP_NUM"),
        (without(SRUN, "SLURM_STEP_NODELIST"), "SLURM_STEP_ID is '0' but SLURM_STEP_NODELIST is not set; expected the"),
        ({**SRUN, "SLURM_STEP_NODELIST": "node["}, r"SLURM_STEP_NODELIST: 'node\[' is not a Slurm node list; expected"),
        ({**SRUN, "SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST: '' is not a Slurm node list; expected"),
    ],
)
def test_a_wrong_environment_names_variable_value_and_expectation(environment, variables, message):
    """This holds for every launcher."""
    environment(variables)

    with pytest.raises(ValueError, match=message):
        ProcessEnvironment.read()


@pytest.mark.parametrize(
    ("variables", "error", "message"),
    [
        (
            {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ValueError,
            r"MASTER_ADDR or MASTER_PORT is not set, but mpirun .* -x MASTER_ADDR=HOST_OF",
        ),
        (HOROVODRUN, ValueError, r"horovodrun started this process without a meeting point.* HorovodEngine"),
        (
            {**TORCH, "MASTER_ADDR": "no-such-host.invalid"}, ConnectionError,
            r"no-such-host\.invalid:29500 \(the launcher\): .*set MASTER_ADDR",
        ),
    ],
    ids=["mpirun on several machines", "horovodrun", "a host that does not resolve"],
)  # fmt: skip
def test_a_missing_or_wrong_meeting_point_is_told_at_once(environment, variables, error, message):
    """The error does not wait for the ten minutes' timeout of the rendezvous."""
    environment(variables)

    with pytest.raises(error, match=message):
        dl.DistributedDataParallelEngine(device="cpu").setup()


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node[1-4]", "node1"),
        ("node[007,009-011]", "node007"),
        ("a1,b[2-3]", "a1"),
        ("r[1-2]n[3,5],login", "r1n3"),
        ("gpu-a[10-12].cluster", "gpu-a10.cluster"),
    ],
)
def test_the_first_host_of_a_node_list(nodelist, host):
    """Brackets may occur anywhere, and contain ranges with leading zeros."""
    assert first_host(nodelist) == host


PLACE = {"rank": 3, "local_rank": 1, "world_size": 4}
MEETING_PORT = 12000 + zlib.crc32(b"3141") // 16384 % 16384


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        ({}, {"name": "plain python"}),
        (TORCHRUN, {"name": "torchrun", **PLACE, "address": "host0", "port": 29500}),
        (MPIRUN, {"name": "mpirun", **PLACE, "address": "127.0.0.1", "port": MEETING_PORT}),
        (HOROVODRUN, {"name": "horovodrun", **PLACE}),
        ({**MPIRUN, **HOROVODRUN}, {"name": "horovodrun", **PLACE}),
    ],
    ids=["plain python", "torchrun", "mpirun", "horovodrun", "horovodrun in mpirun"],
)
def test_env_prints_the_launcher_and_the_place(environment, capsys, variables, launcher):
    """The output also has versions and hardware."""
    environment(variables)

    code = main(["env"])

    facts = json.loads(capsys.readouterr().out)
    assert code == 0
    assert facts["launcher"] == launcher
    assert facts["versions"]["torch"]


def test_env_reports_a_wrong_environment(environment, capsys):
    """The error is part of the report, which is still printed."""
    environment({**TORCH, "WORLD_SIZE": "four"})

    code = main(["env"])

    facts = json.loads(capsys.readouterr().out)
    assert code == 0
    assert facts["launcher"]["error"].startswith("the environment variable WORLD_SIZE is 'four'; expected an integer")
    assert facts["versions"]["torch"]
