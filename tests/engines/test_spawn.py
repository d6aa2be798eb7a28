"""The environment that a spawned process shares with its parent, and the work it finishes before it ends."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from runnerkit.engines.launch.spawn import spawn

PRINT_PATH = [sys.executable, "-c", "import sys; print(sys.path)"]


def _seen():
    import beside_the_script  # only on the caller's sys.path

    program = subprocess.run(PRINT_PATH, capture_output=True, text=True, check=True).stdout
    return beside_the_script.NAME, os.environ.get("PYTHONPATH"), sys.path, program


@pytest.mark.parametrize("is_cold", [False, pytest.param(True, marks=pytest.mark.cold)])
def test_modules_are_found_as_by_the_caller_without_pythonpath(tmp_path, monkeypatch, is_cold):
    """Programs that the user's code starts may run another Python, which those modules would break."""
    (tmp_path / "beside_the_script.py").write_text("NAME = 'beside'")
    (tmp_path / "json.py").write_text("raise ImportError('found before the standard library')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    monkeypatch.setenv("PYTHONPATH", "/the/users/own")

    name, variable, path, program = spawn(_seen, num_processes=1, variables={})

    assert name == "beside"
    assert variable == "/the/users/own"
    assert path == sys.path
    assert "/the/users/own" in program


def _leave_work(path):
    def work():
        time.sleep(0.5)
        path.write_text("done")

    ThreadPoolExecutor(1).submit(work)


def test_work_of_a_thread_pool_is_finished(tmp_path):
    """Threads finish their work, as at the end of any Python process."""
    path = tmp_path / "note"

    spawn(partial(_leave_work, path), num_processes=1, variables={})

    assert path.read_text() == "done"


class _SignalsWhileItIsPickled(Exception):
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
        return type(self), ()


def _fail():
    raise _SignalsWhileItIsPickled


def test_a_rank_that_is_told_to_end_while_it_tells_why_it_failed_tells_it():
    """A closed terminal sends SIGHUP to all, and the calling process sends SIGTERM to the rest once one has failed."""
    with pytest.raises(_SignalsWhileItIsPickled):
        spawn(_fail, num_processes=1, variables={})
