"""Whatever goes wrong in one rank, each rank ends in bounded time with the cause and its location."""

import json
import os
import subprocess
import sys

import pytest

from tests.faults.errors_job import CASES
from tests.free_port import free_port

pytestmark = pytest.mark.slow
LIMIT_S = 30  # per case, on a busy machine; the first includes imports
LENGTHS = "loader 'train' must have equally many batches on all ranks"


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    """Return both ranks' reports as {rank: {case: ...}}, from processes started as by any launcher."""
    folder = tmp_path_factory.mktemp("told")
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-m", "tests.faults.errors_job", str(folder), "warm up", *CASES]
    ranks = [
        subprocess.Popen(
            command, env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True
        )
        for rank in ("0", "1")
    ]
    try:
        errors = [rank.communicate(timeout=300)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 7], errors
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


CAUSES = {
    "model": ("LookupError: in the model", "in batch 3 of loader 'train', epoch 1, rank 1: features float32"),
    "callback": ("LookupError: in the callback", "in batch 3 of loader 'train', epoch 1, rank 1: features"),
    "logger": ("LookupError: in the logger", "in batch 2 of loader 'train', epoch 1, rank 0: features"),
    "loader": ("LookupError: in the data set", "while batch 3 of loader 'train', epoch 1, rank 1 was fetched"),
    "epoch end": ("LookupError: at the epoch's end", "after batch 8 of loader 'train', epoch 1, rank 1"),
    "keys": ("ranks differ in batch_metrics", "rank 0: ['loss']; rank 1: ['loss', 'mine']"),
    "nan": ("FloatingPointError: batch_metrics['loss'] was not finite", "batch 3 of loader 'train', epoch 1, rank 1"),
    "nan in a module": ("epoch 1, step 3, rank 1: the first NaN is in the output of '1' (Spoils)", "rank 1: features"),
    "fewer on rank 1": (LENGTHS, "rank 1 had 3, but rank 0 is at batch 4"),
    "fewer on rank 0": (LENGTHS, "rank 0 had 3, but rank 1 is at batch 4"),
    "known to be fewer": ("loader 'train' has [5, 3] batches on the ranks", "before the first loader"),
    "no data": ("loader 'train' gave no batch", "after batch 0 of loader 'train', epoch 1, rank 1"),
    "stopped early": (LENGTHS, "rank 1 had 3, but rank 0 is at batch 4"),
}


def test_each_case_is_expected_to_end_somehow():
    """A new case needs an expectation."""
    assert CASES.keys() == {"warm up", *CAUSES, "no data to evaluate", "os._exit"}


@pytest.mark.parametrize("case", CAUSES)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_ends_with_the_cause(told, case, rank):
    """The error has the failing rank's own traceback, and not the resulting errors of other ranks."""
    words = told[rank][case]["words"]

    assert all(each in words for each in CAUSES[case])
    assert 'File "' in words
    assert "closed by peer" not in words.lower()
    assert told[rank][case]["seconds"] < LIMIT_S


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_data_to_evaluate_is_no_error(told, rank):
    """The rank waits for the others."""
    assert told[rank]["no data to evaluate"]["words"] == ""


def test_a_rank_that_is_gone_is_named_by_those_that_are_left(told):
    """Only the launcher knows how it ended."""
    case = told[0]["os._exit"]

    assert "rank 1 of 2 ended without an error report: it was killed" in case["words"]
    assert "a rank that waited for it was in batch 3 of loader 'train', epoch 1, rank 0" in case["words"]
    assert "closed by peer" not in case["words"].lower()
    assert case["seconds"] < LIMIT_S


@pytest.mark.cold
def test_torchruns_report_shows_the_cause(tmp_path):
    """The report has the failing rank and its traceback, and not the resulting errors of the others."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    script = tmp_path / "script.py"
    script.write_text("from tests.faults.errors_job import CASES, fit\nfit(**CASES['callback']())\n")

    done = subprocess.run(
        [sys.executable, *launcher, str(script)], capture_output=True, text=True, timeout=240, check=False,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )  # fmt: skip

    report = done.stderr.partition("Root Cause (first observed failure)")[2]
    assert done.returncode == 1
    assert "rank      : 1 " in report
    assert "LookupError: in the callback" in report
    assert "in batch 3 of loader 'train', epoch 1, rank 1" in report
    assert "closed by peer" not in done.stderr.lower()
