"""What several tests of faults need."""

import signal

import pytest


@pytest.fixture
def sighup_as_in_a_terminal():
    """The tests may run under nohup, which lets it be ignored, and so does a run then."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
