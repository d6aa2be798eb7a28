"""examples/predict_to_file.py writes one file, whoever starts its processes."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas
import pytest

from runnerkit.contrib import Digits

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "predict_to_file.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def run(folder, *command):
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_example_writes_every_digit_once_under_any_launcher(tmp_path):
    """In order, read right four times of five; plain python's Parquet and torchrun's CSV say the same."""
    plain = run(tmp_path, sys.executable, EXAMPLE, "--out", "plain.parquet")
    launched = run(tmp_path, *TORCHRUN, EXAMPLE, "--out", "launched.csv")

    targets = Digits(train=False).targets.tolist()
    assert f"{len(targets)} rows in plain.parquet" in plain
    assert launched.count(f"{len(targets)} rows in launched.csv") == 1
    rows, table = pandas.read_csv(tmp_path / "launched.csv"), pandas.read_parquet(tmp_path / "plain.parquet")
    assert rows["target"].tolist() == table["target"].tolist() == targets
    assert rows["predicted"].tolist() == table["predicted"].tolist()
    probabilities = rows[[f"probability_{digit}" for digit in range(10)]].to_numpy()
    np.testing.assert_allclose(probabilities, np.stack(table["probability"]), rtol=1e-4, atol=1e-6)
    assert (rows["target"] == rows["predicted"]).mean() > 0.8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launched.csv", "plain.parquet"]
