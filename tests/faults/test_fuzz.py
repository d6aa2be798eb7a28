"""Thirty random runs of each fuzzer; `make fuzz` runs more."""

import pytest

from tests.faults import fuzz_parity, fuzz_resume
from tests.faults.fuzz_parity import SEEDS


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # some settings deserve a warning
@pytest.mark.parametrize("fuzzer", [fuzz_parity, fuzz_resume], ids=["parity", "resume"])
def test_random_runs_have_the_expected_result(fuzzer):
    """The expected result is that of a hand-written loop, or of the run that was not interrupted."""
    assert list(fuzzer.differences([fuzzer.Case.draw(seed) for seed in SEEDS])) == []
