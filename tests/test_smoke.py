"""Test that the smoke runs, which other Pythons and versions of torch must pass, pass here, and that they can fail."""

import subprocess
import sys

import pytest
import torch

from tests import smoke


@pytest.mark.slow
@pytest.mark.timeout(900)  # it took 230 s beside other test suites
def test_all_smoke_runs_pass():
    """Every part passes in a process of its own, as ``make test-versions`` runs them."""
    done = subprocess.run([sys.executable, "-m", "tests.smoke"], capture_output=True, text=True, timeout=850)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": passed (") == len(smoke.PARTS)


def test_a_failed_part_is_reported(monkeypatch, capsys):
    """A part that computes other weights fails, with its traceback; the following parts still run."""
    monkeypatch.setattr(smoke, "by_hand", lambda **options: torch.zeros(1))
    monkeypatch.setattr(smoke, "PARTS", [smoke.one_process, smoke.resume])
    monkeypatch.setattr("faulthandler.dump_traceback_later", lambda *_, **__: None)

    assert smoke.main() == 1
    told = capsys.readouterr().out
    assert "one_process: FAILED\nTraceback" in told and "resume: passed" in told
