"""Launch commands started as by a user, with access to their output and cleanup of their processes."""

import os
import re
import shutil
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pandas as pd
import psutil
import torch

from tests.tiny import mlp, weights

ROOT = Path(__file__).parents[2]
MARK = "RUNNERKIT_TEST_JOB"  # every process that inherits it belongs to the test, in any session


class Jobs:
    """A folder with the user's script, train.py, and the commands that a test runs in it."""

    def __init__(self, folder):
        self.folder = folder
        self.logdir = folder / "logdir"
        self.mark = uuid.uuid4().hex
        shutil.copy(ROOT / "tests" / "launchers" / "script.py", folder / "train.py")
        self._install(folder / "bin")
        self.changed = {  # in the environment of the commands
            MARK: self.mark,
            "PATH": os.pathsep.join([str(folder / "bin"), os.path.dirname(sys.executable), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        self.environment = {**os.environ, **self.changed}
        self._started = []

    @staticmethod
    def _install(folder):
        """Put the commands of this Python's environment first on the PATH."""
        folder.mkdir()
        programs = {"python": f'#!/bin/sh\nexec {sys.executable} "$@"\n'}
        for name, module in {"torchrun": "torch.distributed.run", "runnerkit": "runnerkit.commands.cli"}.items():
            programs[name] = f"#!{sys.executable}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"
        for name, text in programs.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)

    def with_arguments(self, command, *, num_epochs=2, held_epoch=0, timeout_s=60):
        """Add arguments to train.py in a command; the script pauses in one epoch until :meth:`go`."""
        return re.sub(r"\btrain\.py\b", f"train.py {self.logdir} {num_epochs} {held_epoch} {timeout_s}", command)

    def start(self, command, *, inside=(), variables=None, **arguments):
        """Start a shell command with arguments for its train.py; `inside` is a command that runs it."""
        command = [*inside, "bash", "-c", self.with_arguments(command, **arguments)]
        job = Job(command, self.folder, {**self.environment, **(variables or {})}, len(self._started))
        self._started.append(job)
        return job

    def go(self):
        """Let paused processes continue."""
        (self.folder / "go").touch()

    def left(self):
        """List the processes that belong to this test."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def end(self):
        """Kill the remaining processes."""
        for process in self.left():
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for job in self._started:
            job.process.wait(10)

    def assert_weights(self, expected, *, num_ranks=2):
        """Check that every rank saved `expected`, up to the order of sums, and that logs were written once."""
        for rank in range(num_ranks):
            model = mlp()
            model.load_state_dict(torch.load(self.logdir / f"rank{rank}.pth", weights_only=True))
            torch.testing.assert_close(weights(model), expected, rtol=0, atol=1e-6)
        assert sorted(path.name for path in (self.logdir / "csv").iterdir()) == ["train.csv", "valid.csv"]

    def logged_epochs(self):
        """Return the epochs in train.csv, in the file's order."""
        return pd.read_csv(self.logdir / "csv" / "train.csv")["epoch"].tolist()


class Job:
    """A running command with its output in a file: reading a pipe would wait for every process that holds it."""

    def __init__(self, command, folder, environment, number):
        self.output_path = folder / f"output{number}.txt"
        with self.output_path.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self):
        """Return the output so far."""
        return self.output_path.read_text()

    def wait(self, timeout_s=150):
        """Wait for the command and return its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end within {timeout_s} s; it printed:\n{self.output}") from None

    def wait_for(self, pattern, timeout_s=120):
        """Wait until the output contains `pattern`; return the match."""
        return wait_until(
            lambda: re.search(pattern, self.output), timeout_s, lambda: f"no {pattern!r} in:\n{self.output}"
        )


def wait_until(condition, timeout_s, what):
    """Wait until `condition` returns a true value; return that."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what()}")
        time.sleep(0.1)
    return found
