"""Fixtures of the fault tests."""

import signal

import pytest


@pytest.fixture
def sighup_as_in_a_terminal():
    """Restore the default action of SIGHUP: nohup ignores it, and so would the tested runs."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
