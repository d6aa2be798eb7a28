"""Calls that may block forever get a time limit."""

import threading

import pytest

from runnerkit.engines.failures.time_limit import within


def test_its_value_or_exception_comes_back():
    """The function's value is returned, or its exception raised, as without a limit."""

    def fail():
        raise LookupError("inside")

    assert within(30, lambda: "value") == "value"
    with pytest.raises(LookupError, match="inside"):
        within(30, fail)


def test_what_does_not_end_is_left_behind():
    """The caller continues."""
    with pytest.raises(TimeoutError):
        within(0.05, threading.Event().wait)
