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


@pytest.mark.cold
def test_modules_are_found_as_by_the_caller_without_pythonpath(tmp_path, monkeypatch):
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


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from runnerkit import dl


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return torch.relu(self.layer(x))


if __name__ == "__main__":
    data = TensorDataset(torch.ones(16, 4), torch.zeros(16, dtype=torch.long))
    engine = dl.DistributedDataParallelEngine(2, device="cpu", compile={"backend": "eager"})
    runner = dl.SupervisedRunner().train(
        model=nn.Sequential(Net()),
        criterion=nn.CrossEntropyLoss(),
        loaders={"train": DataLoader(data, batch_size=4), "valid": DataLoader(data, batch_size=4)},
        engine=engine,
    )
    print("loss", runner.epoch_metrics["valid"]["loss"] > 0)
    print("same", type(runner.model[0]) is Net and Net.forward.__globals__ is globals())
"""


@pytest.mark.cold
def test_a_model_that_a_script_defines_is_compiled_in_its_processes(tmp_path):
    """torch.compile looks its globals up in ``__main__``. When the model comes back, its class is what it was."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path, timeout=300)

    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "loss True\nsame True" in ended.stdout


@pytest.mark.cold
def test_a_script_that_another_program_executes_gets_its_model_back(tmp_path):
    """Its classes name ``__main__`` as their module, which is that of the other program and does not have them."""
    script = tmp_path / "script.py"
    script.write_text(
        SCRIPT.replace('compile={"backend": "eager"}', "").replace(" and Net.forward.__globals__ is globals()", "")
    )
    command = f"exec(compile(open({str(script)!r}).read(), 'script.py', 'exec'), {{'__name__': '__main__'}})"

    ended = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, cwd=tmp_path, timeout=300)

    assert ended.returncode == 0, ended.stderr[-2000:]
    assert "loss True\nsame True" in ended.stdout


def _loses_the_other_before_that_one_says_why():
    if os.environ["RANK"] == "1":
        raise RuntimeError("[enforce fail at gloo/transport/tcp/pair.cc] Connection reset by peer")
    time.sleep(1.5)  # a busy machine
    raise LookupError("the real error")


def test_the_cause_is_that_of_the_process_that_was_lost_however_late_it_says_so():
    """A process that is lost has closed its connections before its report is written, or is noticed before."""
    with pytest.raises(LookupError, match="the real error"):
        spawn(_loses_the_other_before_that_one_says_why, num_processes=2, variables={})
