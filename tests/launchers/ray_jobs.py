"""A cluster of Ray nodes on this machine, and scripts that use it."""

import importlib.util
import os
import re
import subprocess
import sys
import threading
from queue import Empty, Queue

import pytest

from tests.alive import still_alive
from tests.launchers.jobs import ROOT, wait_until

STARTS_S = 240  # importing torch in several processes, on a busy machine
ENDS_S = 60  # from a failure to the end of the script; seconds on an idle machine

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'runnerkit[ray]'"
)


class Cluster:
    """Nodes of one CPU each: two processes of a job are on different nodes."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.launchers.ray_cluster", "1", "1"]
        # A process of a starved raylet takes long to register.
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_worker_register_timeout_seconds": str(STARTS_S)}
        self.process = subprocess.Popen(
            command, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines = Queue()
        self._reader = threading.Thread(
            target=lambda: [self._lines.put(line) for line in self.process.stdout], daemon=True
        )
        self._reader.start()
        self.environment |= {"RAY_DEDUP_LOGS": "0", "OMP_NUM_THREADS": "1"}
        self.environment["RAY_ADDRESS"] = self._answer(r"[\d.]+:\d+")

    def do(self, command):
        """Add or kill a node."""
        self.process.stdin.write(f"{command}\n")
        self.process.stdin.flush()
        self._answer("done")

    def _answer(self, pattern):
        while True:
            try:
                line = self._lines.get(timeout=STARTS_S).strip()
            except Empty:
                raise AssertionError("the cluster does not answer") from None
            if re.fullmatch(pattern, line):
                return line

    def close(self):
        """End all nodes."""
        self.process.stdin.close()
        self.process.wait(ENDS_S)
        self._reader.join(ENDS_S)
        self.process.stdout.close()


class Script:
    """A run of ray_script.py, or of another script, with its output."""

    def __init__(self, cluster, folder, *arguments, script=ROOT / "tests" / "launchers" / "ray_script.py"):
        self.logdir = folder / "logdir"
        self.logdir.mkdir(exist_ok=True)
        self._output = folder / "output.txt"
        command = [sys.executable, str(script), *([str(self.logdir), *map(str, arguments)] if arguments else [])]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                command, cwd=folder, env=cluster.environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def output(self):
        """Return the output so far, without colors."""
        return re.sub(r"\x1b\[\d*m", "", self._output.read_text())

    def wait_for(self, pattern):
        """Return the match of `pattern` in the output, once there is one."""
        return wait_until(lambda: re.search(pattern, self.output), STARTS_S, lambda: f"no {pattern!r} in {self.output}")

    def end(self, timeout_s=STARTS_S):
        """Return the exit code; no process of a rank is left then."""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"it does not end within {timeout_s} s; it printed {self.output}") from None
        wait_until(lambda: not self.left(), ENDS_S, lambda: f"{self.left()} are left")
        return code

    def left(self):
        """Return the processes of ranks, known by the pids that they have printed, that are still there."""
        return still_alive({int(pid) for pid in re.findall(r"with pid (\d+)", self.output)})
