"""Fixtures of tests with an S3 server; one server process serves a whole session."""

import contextlib
import itertools

import pytest

from tests.faults import proxy
from tests.server_process import serving
from tests.storage.s3_server import Bucket, environment

_numbers = itertools.count()


@pytest.fixture(scope="session")
def s3_server():
    """Return the URL of an S3 server in another process."""
    for package in ("moto", "flask", "flask_cors", "s3fs", "boto3"):
        pytest.importorskip(package, reason=f"the S3 server of the tests needs {package}, of the extra test")
    with serving("tests.storage.s3_server") as url:
        yield url


@pytest.fixture
def s3(s3_server, monkeypatch):
    """Return a new, empty bucket, which the environment's credentials and endpoint give access to."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment(s3_server).items():
        monkeypatch.setenv(name, value)
    with _no_cached_connections():
        yield Bucket.create(f"bucket-{next(_numbers)}", s3_server)


@pytest.fixture
def s3_proxy(s3, s3_server, monkeypatch):
    """Return the proxy through which the environment's endpoint is reached; `s3` stays direct."""
    with proxy.running(s3_server) as faults:
        monkeypatch.setenv("AWS_ENDPOINT_URL", faults.url)
        with _no_cached_connections():
            yield faults


@contextlib.contextmanager
def _no_cached_connections():
    """Forget the file systems of s3fs before and after a test: they hold another test's endpoint and listings."""
    from s3fs import S3FileSystem

    S3FileSystem.clear_instance_cache()
    yield
    S3FileSystem.clear_instance_cache()
