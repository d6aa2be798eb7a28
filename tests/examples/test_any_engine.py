"""examples/any_engine.py trains on every engine that works without GPUs, and its documented commands run."""

import shlex

import pytest

from examples import any_engine
from runnerkit import read_metrics
from tests.examples.start import start

COMMANDS = [line for line in any_engine.__doc__.splitlines() if "--engine" in line]
ONE_PROCESS = ["CPUEngine", "DeviceEngine", "AMPEngine", "DataParallelEngine", "DataParallelAMPEngine"]
SEVERAL = ["DistributedDataParallelEngine", "FullyShardedDataParallelAMPEngine"]
HOROVOD = ["HorovodEngine", "HorovodAMPEngine"]
NEED_GPUS = {"GPUEngine", *(name for name in any_engine.ENGINES if "APEX" in name)}


def assert_learned(output, engine, folder):
    """Check that more than 90 % of digits are right after five epochs, and that one line says so for any number of
    processes."""
    assert output.count(f"{engine}: valid accuracy") == 1
    metrics = read_metrics(folder / "logs" / "any_engine" / engine)
    valid = metrics[(metrics.loader == "valid") & (metrics.metric == "accuracy")]
    assert valid.value.iloc[-1] > 0.9


@pytest.mark.parametrize(
    "engine",
    [*ONE_PROCESS, *SEVERAL, *(pytest.param(each, marks=[pytest.mark.horovod, pytest.mark.slow]) for each in HOROVOD)],
)
def test_the_example_learns_on_each_engine(engine, tmp_path, monkeypatch, capfd):
    """This includes bf16, DataParallel without GPUs, and engines that start several processes."""
    if engine in HOROVOD:
        pytest.importorskip("horovod.torch", reason="Horovod is not installed: scripts/install_horovod.sh builds it")
    monkeypatch.chdir(tmp_path)

    any_engine.main(["--engine", engine])

    assert_learned(capfd.readouterr().out, engine, tmp_path)


@pytest.mark.timeout(450)
@pytest.mark.parametrize(
    "command", [pytest.param(each, marks=[pytest.mark.slow] if "torchrun" in each else []) for each in COMMANDS]
)
def test_the_commands_in_its_first_lines_run(command, tmp_path):
    """The commands use the Python and the launchers of the tests' environment."""
    assert_learned(start(command, tmp_path), _engine(command), tmp_path)


def test_no_engine_is_left_out():
    """Each engine runs above or needs GPUs."""
    ran = {*ONE_PROCESS, *SEVERAL, *HOROVOD, *map(_engine, COMMANDS)}

    assert ran | NEED_GPUS == set(any_engine.ENGINES)
    assert not ran & NEED_GPUS


def _engine(command):
    words = shlex.split(command)
    return words[words.index("--engine") + 1]


def test_an_engine_that_is_none_is_named(capsys):
    """The error lists the engines."""
    with pytest.raises(SystemExit, match="2"):
        any_engine.main(["--engine", "TPUEngine"])

    message = capsys.readouterr().err
    assert "invalid choice: 'TPUEngine'" in message and "DistributedDataParallelEngine" in message
