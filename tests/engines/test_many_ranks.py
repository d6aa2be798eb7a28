"""The cost of one rank of 4,096: as many collectives as one rank of two, little time and memory, and no files."""

import json
import os
import subprocess
import sys

import pytest

WORLD_SIZE = 4096


def simulate(rank, world_size, logdir):
    command = [sys.executable, "-m", "tests.engines.simulated_rank", str(rank), str(world_size), str(logdir)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_of_many_costs_what_a_rank_of_two_costs(tmp_path):
    """A training step has DDP's collectives, the end of a loader with 21 metric callbacks has one, an evaluation
    step none. Only rank zero opens files for writing, and makes, renames or removes them.

    A data set of 98,304 samples takes less than 5 s and 50 MiB more than one of 48; 0.2 s and 6 MiB were measured.
    Checkpoints gather 10 KiB of random state from each rank, which took at most 110 MiB temporarily.
    """
    of_two, of_many = simulate(1, 2, tmp_path / "two"), simulate(WORLD_SIZE - 1, WORLD_SIZE, tmp_path / "many")
    of_rank_zero = simulate(0, WORLD_SIZE, tmp_path / "zero")

    assert of_many["collectives"] == of_two["collectives"]
    assert set(of_many["collectives"]["end of train"] + of_many["collectives"]["end of valid"]) == {1}
    assert set(of_many["collectives"]["step of valid"]) == {0}
    assert max(of_many["collectives"]["step of train"]) <= 5  # one bucket, two kinds of buffers, DDP's bookkeeping
    assert of_many["setup_s"] < of_two["setup_s"] + 5
    assert of_many["setup_memory_mib"] < of_two["setup_memory_mib"] + 50
    assert of_many["memory_mib"] < of_two["memory_mib"] + 300
    assert of_two["written"] == of_many["written"] == []
    for folder in ("checkpoints", "csv", "tensorboard"):
        assert any(folder in path for path in of_rank_zero["written"])
