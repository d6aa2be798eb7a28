"""Another user of the machine who reaches a job's sockets cannot run code in it."""

import os
import pickle
import shutil
import signal
import subprocess
import time

import pytest
from torch.distributed import TCPStore

from tests.engines.launch_commands import MPIRUN, PYTHON, TORCHRUN
from tests.free_port import free_port

NOBODY = 65534
SCRIPT = """
import os, sys, time
from pathlib import Path
from runnerkit import dl
from tests.tiny import loader, train

folder = Path(sys.argv[1])

class Fails(dl.Callback):
    def on_batch_end(self, runner):
        rank = runner.engine.rank
        if runner.batch_step == 2 and rank == 0:
            store = runner.engine._store.underlying_store
            (folder / "new").write_text(f"{store.host} {store.port}")
            (folder / "new").rename(folder / "store")
        if runner.batch_step == 2 and rank == 1:
            while not (folder / "planted").exists():
                time.sleep(0.01)
            raise LookupError("in rank one")

train(loaders={"train": loader(80, 2)}, callbacks=[Fails()], ddp=True, cpu=True)
"""


class Attack:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def plant(host, port, path):
    """Write the attack to every key that a rank reads, or that earlier versions read."""
    store = TCPStore(host, port)
    failure = "[1, 2, 0.0, 7, null]"
    for group in ("group 1/", ""):
        for number in range(4):
            store.set(f"{group}runnerkit/failure/{number}", pickle.dumps(Attack(path)))
            store.set(f"{group}runnerkit/cause/{number}", pickle.dumps(Attack(path)) if number % 2 else failure)
            store.set(f"{group}runnerkit/consequence/{number}", failure if number % 2 else pickle.dumps(Attack(path)))
        store.add(f"{group}runnerkit/consequences", 1)
        store.add(f"{group}runnerkit/failures", 3)
        store.set(f"{group}runnerkit/failed", pickle.dumps(Attack(path)))
        store.set(f"{group}loader/1/further", pickle.dumps(Attack(path)))
    store.set("runnerkit/leader", pickle.dumps(Attack(path)))


def as_nobody(function, *arguments):
    """Call a function in a process of another user."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        try:
            function(*arguments)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def jobs(launcher, words):
    """Yield the commands to start, each with its environment variables."""
    if launcher != "manually":
        yield {"torchrun": TORCHRUN, "mpirun": MPIRUN}[launcher] + words, {}
        return
    port = free_port()
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for rank in "01":
        yield [PYTHON, *words], {**place, "RANK": rank, "LOCAL_RANK": rank}


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("launcher", ["manually", "torchrun", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_what_a_stranger_plants_in_the_store_is_not_run(tmp_path, launcher):
    """The store listens only on the loopback interface, and the failed rank's error is still reported."""
    if launcher == "mpirun" and shutil.which("mpirun") is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    script, target = tmp_path / "script.py", tmp_path / "open to all"
    script.write_text(SCRIPT)
    target.mkdir()
    target.chmod(0o777)
    processes = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, **variables, "PYTHONPATH": os.getcwd()},
        )
        for command, variables in jobs(launcher, [str(script), str(tmp_path)])
    ]  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "store").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        host, port = (tmp_path / "store").read_text().split()
        as_nobody(plant, host, int(port), target / "proof")
        (tmp_path / "planted").touch()
        outputs = [process.communicate(timeout=60)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()

    assert not list(target.iterdir())
    assert host == "127.0.0.1"
    assert all(process.returncode for process in processes)
    assert all("LookupError: in rank one" in output for output in outputs)
