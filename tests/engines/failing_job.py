"""A training job of two processes in which rank 1 fails, and a check that no process outlives it."""

import contextlib
import os
import re
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.alive import still_alive
from tests.engines.launch_commands import HOROVODRUN, MPIRUN, PYTHON, TORCHRUN, needs_horovod, needs_mpi

LIMIT_S = 30  # a defect waits for at least a minute; a slow machine takes 10
SCRIPT = """
import os, signal, sys, time
from runnerkit import dl
from tests.tiny import loader, train

class Trouble(dl.Callback):
    def on_batch_end(self, runner):
        if runner.epoch_step == 2 and runner.loader_batch_step == 2 and runner.engine.rank == 1:
            {trouble}
        if runner.epoch_step == 2 and runner.loader_batch_step == 1:
            os.write(1, f"ready {{runner.engine.rank}} {{os.getpid()}}\\n".encode())  # one write, one line

train(loaders={{"train": loader(400, 2, num_workers=1)}}, callbacks=[Trouble()], num_epochs=1000, {engine})
"""
RAISE = 'raise ArithmeticError("rank one has had enough")'
DDP, HOROVOD = "ddp=True, cpu=True", 'engine=dl.HorovodEngine(2, device="cpu")'
# The command without the script's path, and the engine.
STARTS = {
    "DDP": ([PYTHON], DDP),
    "torchrun": (TORCHRUN, DDP),
    "Horovod": ([PYTHON], HOROVOD),
    "horovodrun": (HOROVODRUN, HOROVOD),
    "mpirun": (MPIRUN, HOROVOD),
}


@dataclass
class FailingJob:
    """A running job.

    Attributes:
        process: the process that was started.
        pids: its descendants, once all ranks were training.
    """

    process: subprocess.Popen[str]
    pids: list[int]

    def finish(self) -> str:
        """Wait until the job ends, within `LIMIT_S`, and no process is left; return its standard error."""
        begin = time.monotonic()
        _, errors = self.process.communicate(timeout=60)
        assert time.monotonic() - begin < LIMIT_S
        deadline = time.monotonic() + LIMIT_S
        while still_alive(self.pids) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not still_alive(self.pids)
        return errors


@contextlib.contextmanager
def failing_job(folder: Path, start: str, trouble: str = "pass"):
    """Start a job and wait until both ranks are training; at the end, kill all processes that are left.

    Args:
        folder: where the script is written.
        start: a key of `STARTS`; the test is skipped if its requirements are missing.
        trouble: a statement that rank 1 runs in its second epoch.
    """
    command, engine = STARTS[start]
    if engine == HOROVOD:
        needs_mpi() if start == "mpirun" else needs_horovod()
    script = folder / "script.py"
    script.write_text(SCRIPT.format(trouble=trouble, engine=engine))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen([*command, str(script)], **pipes, env=environment, start_new_session=True)
    try:
        _wait_until_both_train(process)
        yield FailingJob(process, [each.pid for each in psutil.Process(process.pid).children(recursive=True)])
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.stdout.close()
        process.stderr.close()
        process.wait()


def _wait_until_both_train(process: subprocess.Popen[str]) -> None:
    ranks = set()
    while len(ranks) < 2:
        line = process.stdout.readline()
        assert line, process.stderr.read()
        if found := re.search(r"ready (\d)", line):  # a launcher may print a prefix
            ranks.add(found.group(1))
