"""The other frameworks' scripts take turns with ours and do the same work, in their own environment."""

import pytest

from benchmarks.cases import all_cases
from benchmarks.harness import measure
from tests.peers import PEERS, needs_peers


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_framework_takes_its_turns():
    """No framework hangs, fails, or reports a loss other than raw PyTorch's."""
    needs_peers()
    peers = str(PEERS / "bin" / "python")
    (case,) = (each for each in all_cases(peers, num_batches=150) if each.key == "steps-log")

    outcome = measure(case.candidates, num_rounds=1, tolerance=case.tolerance, in_turns=case.in_turns, timeout_s=30)

    assert not outcome.failures
    assert all(outcome.ratio(each.name, case.figures[0]) > 0 for each in case.candidates)
