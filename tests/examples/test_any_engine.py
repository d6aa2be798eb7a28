"""examples/any_engine.py trains on every engine that a machine without GPUs has, by the commands in its first lines."""

import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from examples import any_engine
from runnerkit import read_metrics

ROOT = Path(__file__).parents[2]
COMMANDS = [line for line in any_engine.__doc__.splitlines() if "--engine" in line]
ONE_PROCESS = ["CPUEngine", "DeviceEngine", "AMPEngine", "DataParallelEngine", "DataParallelAMPEngine"]
SEVERAL = [
    "DistributedDataParallelEngine",
    "FullyShardedDataParallelAMPEngine",
    *("HorovodEngine", "HorovodAMPEngine"),
]
NEED_GPUS = {"GPUEngine", *(name for name in any_engine.ENGINES if "APEX" in name)}


def run(command, folder):
    """Run a shell command as from the root of the checkout; logs go below `folder`."""
    (folder / "examples").symlink_to(ROOT / "examples")
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=400
    )


def assert_learned(output, engine, folder):
    """Digits are read right nine times of ten after five epochs; one line says so, however many processes."""
    assert output.count(f"{engine}: valid accuracy") == 1
    metrics = read_metrics(folder / "logs" / "any_engine" / engine)
    valid = metrics[(metrics.loader == "valid") & (metrics.metric == "accuracy")]
    assert valid.value.iloc[-1] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("engine", ONE_PROCESS)
def test_the_example_learns_on_an_engine_of_one_process(engine, tmp_path, monkeypatch, capsys):
    """Also in bf16, and where DataParallel finds no GPUs to share batches out to."""
    monkeypatch.chdir(tmp_path)

    any_engine.main(["--engine", engine])

    assert_learned(capsys.readouterr().out, engine, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("engine", SEVERAL)
def test_the_example_learns_on_an_engine_of_several_processes(engine, tmp_path):
    """Which plain python starts."""
    if engine.startswith("Horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: scripts/install_horovod.sh builds it")

    done = run(f"python examples/any_engine.py --engine {engine}", tmp_path)

    assert done.returncode == 0, done.stderr
    assert_learned(done.stdout, engine, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(450)
@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_in_its_first_lines_run(command, tmp_path):
    """As they stand there."""
    done = run(command, tmp_path)

    assert done.returncode == 0, done.stderr
    assert_learned(done.stdout, _engine(command), tmp_path)


def test_no_engine_is_left_out():
    """Each runs above, or needs GPUs."""
    ran = {*ONE_PROCESS, *SEVERAL, *map(_engine, COMMANDS)}

    assert ran | NEED_GPUS == set(any_engine.ENGINES)
    assert not ran & NEED_GPUS


def _engine(command):
    words = shlex.split(command)
    return words[words.index("--engine") + 1]


def test_an_engine_that_is_none_is_named():
    """With those that there are."""
    command = [sys.executable, str(ROOT / "examples" / "any_engine.py"), "--engine", "TPUEngine"]

    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    assert done.returncode == 2
    assert "invalid choice: 'TPUEngine'" in done.stderr and "DistributedDataParallelEngine" in done.stderr
