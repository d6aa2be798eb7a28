"""examples/any_engine.py trains on every engine that a machine without GPUs has."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from runnerkit import read_metrics

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["CPUEngine", "DistributedDataParallelEngine", "FullyShardedDataParallelEngine"])
def test_the_example_learns_on_any_engine(engine, tmp_path):
    """Digits are read right nine times of ten after five epochs; one line says so, however many processes."""
    command = [sys.executable, str(ROOT / "examples" / "any_engine.py"), "--engine", engine]

    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=150
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count(f"{engine}: valid accuracy") == 1
    metrics = read_metrics(tmp_path / "logs" / "any_engine" / engine)
    valid = metrics[(metrics.loader == "valid") & (metrics.metric == "accuracy")]
    assert valid.value.iloc[-1] > 0.9


def test_an_engine_that_is_none_is_named():
    """With those that there are."""
    command = [sys.executable, str(ROOT / "examples" / "any_engine.py"), "--engine", "TPUEngine"]

    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)

    assert done.returncode == 2
    assert "invalid choice: 'TPUEngine'" in done.stderr and "DistributedDataParallelEngine" in done.stderr
