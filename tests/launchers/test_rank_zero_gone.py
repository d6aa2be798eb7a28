"""Tests that ranks are told when rank zero ends while they join its store."""

import subprocess
import sys
from datetime import timedelta
from types import SimpleNamespace

import pytest

from runnerkit.engines.launch import rendezvous
from runnerkit.engines.launch.meeting_point import MeetingPoint
from tests.free_port import free_port

ENDS = """
import os
from torch.distributed import TCPStore

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
store.get("joined/1")
os._exit(3)
"""


def test_rank_zero_that_ends_while_others_join_is_named():
    """The error says that rank zero has ended, and does not send the user to look for another port."""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", ENDS], stdout=subprocess.PIPE, text=True) as rank_zero:
        assert rank_zero.stdout is not None
        store_port = int(rank_zero.stdout.readline())
        environment = SimpleNamespace(
            rank=1, world_size=2, launcher="srun", job="1.0", address="127.0.0.1", ports=(port,),
            is_on_one_machine=True, is_store_shared=False, store=None,
        )  # fmt: skip
        with (
            MeetingPoint((port,), job="srun 1.0 of 2 processes", store_port=store_port, on_loopback=True),
            pytest.raises(ConnectionError, match="rank 0, which serves the job's store, has ended") as error,
        ):
            rendezvous.join_job(environment, timedelta(seconds=20))
    assert "MASTER_ADDR" not in str(error.value)
