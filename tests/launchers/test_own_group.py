"""Processes and process groups created by the user's own code, as in torch's tutorials."""

import os

import pytest
import torch.distributed as dist

from runnerkit import dl
from runnerkit.engines.process_environment import ProcessEnvironment
from tests.engines.on_cpu import ddp
from tests.free_port import free_port
from tests.launchers.docs import scripts
from tests.tiny import train, weights

SPAWN = """
import runpy
import sys

import torch.distributed as dist
import torch.multiprocessing as mp


def work(rank, port, arguments):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    assert dist.is_initialized()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(work, args=(int(sys.argv[1]), sys.argv[2:]), nprocs=2)
"""


@pytest.mark.slow
def test_ddp_trains_in_the_group_that_the_user_made(jobs, expected):
    """With `mp.spawn` and an address, two ranks train, without further processes, to every launcher's weights."""
    (jobs.folder / "spawn.py").write_text(SPAWN)

    job = jobs.start(f"python spawn.py {free_port()} train.py")

    assert job.wait() == 0, job.output
    assert {f"rank {rank} of 2" in job.output for rank in range(2)} == {True}
    jobs.assert_weights(expected(2))


@pytest.mark.slow
def test_the_pages_script_trains_in_its_own_group(jobs):
    """The script asserts its rank and its number of steps itself."""
    [script] = scripts("Your own processes and process group")
    (jobs.folder / "own.py").write_text(script.replace("free.getsockname()[1]", str(free_port())))

    job = jobs.start("python own.py")

    assert job.wait() == 0, job.output


@pytest.fixture
def lone_group(monkeypatch):
    """Yield a process group of this process alone."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_group_of_one_process_is_one_process(lone_group):
    """It trains in this process, as on the CPU, and does not destroy the group."""
    engine = ddp()

    assert weights(train(engine=engine).model).equal(weights(train().model))
    assert ProcessEnvironment.read().launcher == "init_process_group"
    assert engine.num_processes == 1 and dist.is_initialized()


def test_a_launcher_is_asked_before_the_group(lone_group, monkeypatch):
    """A contradiction is an error, as the ranks in logs and in collectives would differ."""
    variables = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(ValueError, match=r"made this process rank 0 of 1, but the launcher rank 1 of 2: unset RANK"):
        train(engine=dl.DistributedDataParallelEngine(device="cpu"))


def test_a_world_size_alone_does_not_hide_the_group(lone_group, monkeypatch):
    """Tutorials set it in the environment, and pass the rank to `init_process_group`."""
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "1")

    assert ProcessEnvironment.read().launcher == "init_process_group"
