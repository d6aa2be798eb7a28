"""After one process is killed, stopped or ended, all end within seconds, name the cause and leave valid checkpoints."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.checkpoints.fault import fault_of
from runnerkit.checkpoints.folder import CheckpointFolder
from tests.alive import is_alive
from tests.engines.launch_commands import MPIRUN, PYTHON, TORCHRUN
from tests.tiny import train

pytestmark = pytest.mark.slow
SCRIPT = """
import os, sys
from runnerkit import dl
from tests.tiny import loader, train

def tell(what, rank):
    os.write(1, f"{{what}} {{rank}} {{os.getpid()}}\\n".encode())  # one write, one line

class Ready(dl.Callback):
    def on_epoch_start(self, runner):
        if runner.epoch_step == 2:
            tell("rank", runner.engine.rank)

def init(worker_id):
    tell("worker", os.environ.get("RANK", 0))

logdir = sys.argv[1]
data = loader(16, 2, num_workers=1, persistent_workers=True, worker_init_fn=init)
checkpoint = dl.CheckpointCallback(logdir, content="runner", every_steps=3)
train(
    num_epochs=100_000, loaders={{"train": data}}, logdir=logdir, callbacks=[Ready(), checkpoint, *{callbacks}],
    engine={engine},
)
"""
DDP = 'dl.DistributedDataParallelEngine(2, device="cpu", timeout_s={timeout_s})'


class Job:
    """A running job and all processes that belong to it."""

    def __init__(self, folder, *, engine="dl.CPUEngine()", callbacks="[]", launcher=(PYTHON,), num_ranks=1):
        script, self.logdir = folder / "script.py", folder / "log"
        script.write_text(SCRIPT.format(engine=engine, callbacks=callbacks))
        self.errors = folder / "errors.txt"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*launcher, str(script), str(self.logdir)],
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self.pids, self.workers = {}, {}  # by rank
        while len(self.pids) < num_ranks:
            line = self.process.stdout.readline()
            assert line, self.errors.read_text()
            if line.startswith(("rank ", "worker ")):
                what, rank, pid = line.split()
                (self.pids if what == "rank" else self.workers)[int(rank)] = int(pid)
        parent = psutil.Process(self.process.pid)
        self.family = [parent, *parent.children(recursive=True)]

    def left(self):
        """Return the processes that are still running."""
        return [each for each in self.family if is_alive(each)]

    def end(self):
        for each in self.left():
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self.process.stdout.close()
        self.process.wait()

    def assert_ends(self, *, within_s):
        """Check that all processes end, loaders' workers too, and checkpoints are complete; return the output."""
        until = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < until:
            self.process.poll()
            time.sleep(0.05)
        assert not left, f"{left} are left after {within_s} s; it printed:\n{self.errors.read_text()}"
        self.process.wait()
        folder = CheckpointFolder(self.logdir / "checkpoints")
        assert folder.records and not folder.is_rebuilt
        assert [fault for record in folder.records if (fault := fault_of(folder.folder / record.name, record))] == []
        return self.errors.read_text()


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start_job(**options):
        jobs.append(Job(tmp_path, **options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_loaders_worker_that_is_killed(start, num_ranks):
    """The error names its loader, the process and the rank, and the resulting errors of other ranks are not shown."""
    job = start(engine=DDP.format(timeout_s=60) if num_ranks == 2 else "dl.CPUEngine()", num_ranks=num_ranks)
    worker = job.workers[num_ranks - 1]

    os.kill(worker, signal.SIGKILL)

    errors = job.assert_ends(within_s=30)
    assert job.process.returncode == 1
    sentences = (  # torch's messages, depending on whether the signal or the exit code is noticed first
        f"DataLoader worker (pid {worker}) is killed by signal: Killed",
        f"DataLoader worker (pid(s) {worker}) exited unexpectedly",
    )
    assert any(sentence in errors for sentence in sentences), errors
    assert "loader 'train'" in errors and ("rank 1 of 2" in errors) is (num_ranks == 2)
    assert "closed by peer" not in errors.lower()


def test_a_worker_whose_connection_breaks_before_its_death_is_known():
    """Otherwise the error would be raised at any later line, such as while the failure is being reported."""
    runner = dl.SupervisedRunner()
    loaders = {"train": DataLoader([BreaksWhenRead()], batch_size=1, num_workers=1, collate_fn=list)}

    with pytest.raises(RuntimeError, match="is killed by signal: Killed") as raised:
        train(runner=runner, loaders=loaders)

    assert isinstance(raised.value.__context__, ConnectionResetError)
    assert runner.exception is raised.value
    assert any("while batch 1 of loader 'train'" in note for note in raised.value.__notes__)


class BreaksWhenRead:
    """A sample whose worker is killed while the loader's process reads it and notices the lost connection first."""

    def __reduce__(self):
        return break_connection, (os.getpid(),)


def break_connection(worker):
    threading.Timer(0.2, os.kill, (worker, signal.SIGKILL)).start()
    raise ConnectionResetError


def test_a_worker_ends_whose_process_was_killed_before_it_began(tmp_path):
    """Torch's own worker would mistake its new parent for the loader's process."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import os, time
from runnerkit.sampling.loader_worker import WorkerStart
from torch.utils.data import DataLoader

def begin(worker_id):
    print(os.getpid(), flush=True)
    time.sleep(1)

list(DataLoader(range(4), num_workers=1, worker_init_fn=WorkerStart(begin)))
"""
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as process:
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.wait()

        try:
            deadline = time.monotonic() + 20
            while is_alive(worker) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not is_alive(worker)
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()


def test_a_rank_of_torchruns_that_is_killed(start):
    """Torchrun names the rank and ends the other."""
    job = start(engine=DDP.format(timeout_s=60), num_ranks=2, launcher=TORCHRUN)

    os.kill(job.pids[1], signal.SIGKILL)

    errors = job.assert_ends(within_s=60)
    assert job.process.returncode == 1
    assert "exitcode  : -9" in errors and f"pid: {job.pids[1]}" in errors


@pytest.mark.parametrize("launcher", [TORCHRUN, MPIRUN], ids=["torchrun", "mpirun"])
def test_a_launcher_that_is_killed(start, launcher):
    """The ranks end by themselves."""
    if shutil.which(launcher[0]) is None:
        pytest.skip("needs mpirun: apt-get install openmpi-bin")
    job = start(engine=DDP.format(timeout_s=60), num_ranks=2, launcher=launcher)

    job.process.kill()

    job.assert_ends(within_s=30)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_the_whole_process_group(start, number):
    """A shell, a closed terminal or Slurm signals loaders' workers too; the run saves and ends."""
    job = start()

    os.killpg(job.process.pid, number)

    errors = job.assert_ends(within_s=20)
    assert job.process.returncode == 75, errors
    assert f"{number.name}: saved a checkpoint and stopped after step" in errors


def test_a_rank_that_is_stopped_is_found_by_the_hang_callback(start):
    """The other ranks report where they wait; the stopped one, which cannot report, is ended too."""
    job = start(engine=DDP.format(timeout_s=600), num_ranks=2, callbacks="[dl.HangCallback(timeout_s=4)]")

    os.kill(job.pids[1], signal.SIGSTOP)

    errors = job.assert_ends(within_s=40)
    assert job.process.returncode == 1
    assert "rank 0 of 2 has made no progress for 4 s in loader 'train'" in errors


def test_a_rank_that_is_stopped_is_found_by_the_engines_time_limit(start):
    """The error names the rank and says that it is stopped."""
    job = start(engine=DDP.format(timeout_s=5), num_ranks=2)

    os.kill(job.pids[1], signal.SIGSTOP)

    errors = job.assert_ends(within_s=40)
    assert job.process.returncode == 1
    assert "rank 1 of 2 is stopped" in errors
