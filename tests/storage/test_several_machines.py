"""Tests of runs whose processes share nothing but the store, as on several machines."""

import os
import shutil
import subprocess
import sys

import pytest

from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.urls import STAGING
from tests.faults.fingerprint import differences, fingerprint
from tests.free_port import free_port
from tests.storage.machine_job import MACHINES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def start(tmp_path):
    """Return a function that trains with a process on each of two machines, whose disks are empty."""
    number = 0

    def train(kind, logdir, num_epochs):
        nonlocal number
        number += 1
        shutil.rmtree(tmp_path / "machines", ignore_errors=True)
        variables = {
            **os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", MACHINES: str(tmp_path / "machines"),
        }  # fmt: skip
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.storage.machine_job", kind, str(logdir), str(num_epochs)],
                env={**variables, "RANK": str(rank), STAGING: str(tmp_path / "machines" / str(rank))},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        printed = [each.communicate(timeout=240)[0] for each in processes]
        assert [each.returncode for each in processes] == [0, 0], "\n\n".join(printed)
        left = [path for path in (tmp_path / "machines").rglob("*") if path.is_file() and path.name != ".place"]
        assert not left, f"files left on the machines' disks: {left}"
        return [line for text in printed for line in text.splitlines() if line.startswith("weights")]

    return train


@pytest.mark.parametrize("kind", ["ddp", "meta"])
def test_a_resumed_run_on_two_machines_is_equal_to_one_on_a_disk(s3, start, tmp_path, kind):
    """Each process uploads its shards, and finds all that it needs in the store: also the best weights at the end."""
    local = [start(kind, tmp_path / "local", num_epochs) for num_epochs in (1, 3)]
    stored = [start(kind, s3.url(), num_epochs) for num_epochs in (1, 3)]

    assert stored == local
    expected, found = fingerprint(tmp_path / "local"), fingerprint(local_copy(s3.url()))
    assert differences(expected, found) == []
    assert len(found) > 20
