"""Fixtures of tests of stores: each has its own staging folders, copies and memory."""

import pytest

from runnerkit.storage.remote import copies, lease, store
from runnerkit.storage.remote.urls import STAGING
from tests.storage.faulty_store import FaultyFileSystem, registered


@pytest.fixture(autouse=True)
def staging(tmp_path, monkeypatch):
    """Return the folder of all staging folders, which does not exist yet."""
    folder = tmp_path / "staging"
    monkeypatch.setenv(STAGING, str(folder))
    monkeypatch.setattr(copies, "_folder", None)
    monkeypatch.setattr(copies, "_marks", {})
    return folder


@pytest.fixture
def short_times(monkeypatch):
    """Wait for nothing long."""
    monkeypatch.setattr(lease, "BEAT_S", 0.1)
    monkeypatch.setattr(lease, "TAKEOVER_S", 0.5)
    monkeypatch.setattr(lease, "RELEASE_PATIENCE_S", 1.0)
    monkeypatch.setattr(store, "_FIRST_PAUSE_S", 0.005)
    monkeypatch.setattr(store, "_LONGEST_PAUSE_S", 0.02)


@pytest.fixture
def faulty():
    """Return the class of the file system of faulty:// URLs, empty and without faults."""
    with registered():
        yield FaultyFileSystem


@pytest.fixture(scope="module", params=["memory", "s3"])
def _kind(request):
    """Start the server, if it is needed, before a test's own fixtures."""
    if request.param == "s3":
        request.getfixturevalue("s3_server")
    return request.param


@pytest.fixture
def url(_kind, request):
    """Return the URL of a logdir: in a store without conditional writes, and in one with them."""
    return "memory://runs/mine" if _kind == "memory" else request.getfixturevalue("s3").url()
