"""Tests of the status file of runs whose logdir is in a store."""

import time

import pytest

from runnerkit.loop import run_status
from runnerkit.storage.remote import uploads
from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.status_file import read_status
from tests.storage.stored_runs import At, train


@pytest.fixture(autouse=True)
def at_once(short_times, monkeypatch):
    """Wait for nothing long; upload logs at each flush."""
    monkeypatch.setattr(uploads, "LOGS_EVERY_S", 0.0)


def status_at(url):
    return read_status(local_copy(url, logs_only=True))


def test_the_end_of_a_run_is_in_the_store(url):
    """A run that failed, and was resumed and finished, says so there."""

    def fail():
        raise InterruptedError("stopped by the test")

    with pytest.raises(InterruptedError):
        train(url, At(fail, step=6))
    failed = status_at(url)
    train(url)
    finished = status_at(url)

    assert (failed["state"], failed["step"], failed["error"]["type"]) == ("failed", 6, "InterruptedError")
    assert (finished["state"], finished["step"], finished["error"]) == ("finished", 8, None)


def test_the_store_is_updated_within_a_pass(url, monkeypatch):
    """The thread has the file uploaded, which otherwise happens after each pass."""
    monkeypatch.setattr(run_status, "EVERY_S", 0.05)
    seen = []

    def wait():
        deadline = time.monotonic() + 60
        while not seen and time.monotonic() < deadline:
            try:
                status = status_at(url)
            except FileNotFoundError:  # nothing is uploaded yet
                status = None
            if status is not None and status["step"] == 3:
                seen.append(status["state"])
            time.sleep(0.05)

    train(url, At(wait, step=3), num_epochs=1)

    assert seen == ["running"]
