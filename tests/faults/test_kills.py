"""After one process is killed, stopped or ended, all end within seconds, name the cause and leave valid checkpoints."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
from torch import nn
from torch.utils.data import DataLoader

from runnerkit import dl
from runnerkit.checkpoints.fault import fault_of
from runnerkit.checkpoints.folder import CheckpointFolder
from tests.engines.launch_commands import MPIRUN, PYTHON, TORCHRUN
from tests.tiny import mlp, sgd

pytestmark = [
    pytest.mark.cold,  # a job's processes are known by an environment variable in /proc
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc, which only Linux has"),
]
MARK = "RUNNERKIT_KILLS_TEST"  # an environment variable that identifies a job's processes
SCRIPT = textwrap.dedent(
    """
    import os, sys
    from torch import nn
    from runnerkit import dl
    from tests.tiny import loader, mlp, sgd

    class Ready(dl.Callback):
        def on_epoch_start(self, runner):
            if runner.epoch_step == 2:
                os.write(1, f"ready {{runner.engine.rank}} {{os.getpid()}}\\n".encode())  # one write, one line

    model, logdir = mlp(), sys.argv[1]
    dl.SupervisedRunner().train(
        model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), num_epochs=100_000,
        loaders={{"train": loader(16, 2, num_workers=1, persistent_workers=True)}}, logdir=logdir,
        callbacks=[Ready(), dl.CheckpointCallback(logdir, mode="runner", every_steps=3), *{callbacks}],
        engine={engine}, loggers={{"console": None}},
    )
    """
)
DDP = 'dl.DistributedDataParallelEngine(2, device="cpu", timeout_s={timeout_s})'


class Job:
    """A running job and all processes that belong to it."""

    def __init__(self, folder, *, engine="dl.CPUEngine()", callbacks="[]", launcher=(PYTHON,), num_ranks=1):
        script, self.logdir, self.mark = folder / "script.py", folder / "log", str(folder)
        script.write_text(SCRIPT.format(engine=engine, callbacks=callbacks))
        self.errors = folder / "errors.txt"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*launcher, str(script), str(self.logdir)],
                stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True,
                env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", MARK: self.mark},
            )  # fmt: skip
        self.pids = {}
        while len(self.pids) < num_ranks:
            line = self.process.stdout.readline()
            assert line, self.errors.read_text()
            if line.startswith("ready"):
                self.pids[int(line.split()[1])] = int(line.split()[2])

    def worker_of(self, rank):
        """Return the worker process of a rank's loader."""
        (worker,) = (pid for pid in self.left() if parent(pid) == self.pids[rank])
        return worker

    def left(self):
        """Return the processes that are still running."""
        found = []
        for path in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                is_ours = f"{MARK}={self.mark}\0".encode() in (path / "environ").read_bytes()
                if is_ours and stat(path.name)[0] not in "ZX":
                    found.append(int(path.name))
        return found

    def end(self):
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.stdout.close()
        self.process.wait()

    def assert_ends(self, *, within_s):
        """Check that all processes end, loaders' workers too, and checkpoints are complete; return the output."""
        until = time.monotonic() + within_s
        while (left := self.left()) and time.monotonic() < until:
            self.process.poll()
            time.sleep(0.05)
        assert not left, f"{len(left)} processes are left after {within_s} s; it printed:\n{self.errors.read_text()}"
        self.process.wait()
        folder = CheckpointFolder(self.logdir / "checkpoints")
        assert folder.records and not folder.is_rebuilt
        assert [fault for record in folder.records if (fault := fault_of(folder.folder / record.name, record))] == []
        return self.errors.read_text()


def stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def parent(pid):
    return int(stat(pid)[1])


@pytest.fixture
def start(tmp_path):
    jobs = []

    def start_job(**options):
        jobs.append(Job(tmp_path, **options))
        return jobs[-1]

    yield start_job
    for job in jobs:
        job.end()


def test_a_loaders_worker_that_is_killed(start):
    """The error names its loader and the process."""
    job = start()
    worker = job.worker_of(0)

    os.kill(worker, signal.SIGKILL)

    errors = job.assert_ends(within_s=20)
    assert job.process.returncode == 1
    assert_names(worker, errors)
    assert "loader 'train'" in errors


def test_a_worker_of_one_ranks_loader_that_is_killed(start):
    """The error also names the rank, and the resulting errors of other ranks are not shown."""
    job = start(engine=DDP.format(timeout_s=60), num_ranks=2)
    worker = job.worker_of(1)

    os.kill(worker, signal.SIGKILL)

    errors = job.assert_ends(within_s=30)
    assert job.process.returncode == 1
    assert_names(worker, errors)
    assert "rank 1 of 2" in errors and "closed by peer" not in errors.lower()


def assert_names(worker, errors):
    """Check for one of torch's two messages, depending on whether the signal or the exit code is noticed first."""
    sentences = (
        f"DataLoader worker (pid {worker}) is killed by signal: Killed",
        f"DataLoader worker (pid(s) {worker}) exited unexpectedly",
    )
    assert any(sentence in errors for sentence in sentences), errors


def test_a_worker_whose_connection_breaks_before_its_death_is_known():
    """Otherwise the error would be raised at any later line, such as while the failure is being reported."""
    runner, model = dl.SupervisedRunner(), mlp()

    with pytest.raises(RuntimeError, match="is killed by signal: Killed") as raised:
        runner.train(
            model=model, criterion=nn.CrossEntropyLoss(), optimizer=sgd(model), loggers={"console": None},
            loaders={"train": DataLoader([BreaksWhenRead()], batch_size=1, num_workers=1, collate_fn=list)},
        )  # fmt: skip

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
        textwrap.dedent(
            """
            import os, sys, time
            from runnerkit.sampling.loader_worker import WorkerStart
            from torch.utils.data import DataLoader

            def begin(worker_id):
                print(os.getpid(), flush=True)
                time.sleep(1)

            list(DataLoader(range(4), num_workers=1, worker_init_fn=WorkerStart(begin)))
            """
        )
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment) as process:
        worker = psutil.Process(int(process.stdout.readline()))
        process.kill()
        process.wait()

        try:
            worker.wait(timeout=20)
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
def test_a_signal_to_the_whole_process_group(start, number, sighup_as_in_a_terminal):
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
