"""The S3 server of the tests behaves as S3 does where the package relies on it."""

import http.client
import io
import threading
import time
from urllib.parse import urlsplit

import pytest

from tests.storage.s3_server import OneAtATime


def test_a_bucket_is_empty_and_apart_from_others(s3):
    """Objects are read and listed past the package."""
    s3.put("run/notes.txt", b"mine")
    s3.put("run-2/notes.txt", b"other")

    assert s3.objects("run/") == {"run/notes.txt": b"mine"}
    assert s3.names() == ["run-2/notes.txt", "run/notes.txt"]

    s3.delete("run/notes.txt")

    assert s3.names() == ["run-2/notes.txt"] and s3.uploads() == []
    assert s3.url() == f"s3://{s3.name}/run"


def test_fsspec_finds_the_server_and_the_credentials_in_the_environment(s3):
    """URLs need no options."""
    import fsspec

    with fsspec.open(s3.url("run/a"), "wb") as file:
        file.write(b"1" * 6_000_000)  # in two parts

    assert s3.read("run/a") == b"1" * 6_000_000


def test_a_write_can_depend_on_a_version(s3):
    """Of two writers that expect the same version, one succeeds."""
    from botocore.exceptions import ClientError

    version = s3.client.put_object(Bucket=s3.name, Key="lease", Body=b"0")["ETag"]
    s3.client.put_object(Bucket=s3.name, Key="lease", Body=b"1", IfMatch=version)

    with pytest.raises(ClientError, match="PreconditionFailed"):
        s3.client.put_object(Bucket=s3.name, Key="lease", Body=b"2", IfMatch=version)
    with pytest.raises(ClientError, match="PreconditionFailed"):
        s3.client.put_object(Bucket=s3.name, Key="lease", Body=b"2", IfNoneMatch="*")

    assert s3.read("lease") == b"1"


def test_requests_are_handled_one_at_a_time():
    """Each is alone between moto's check of a condition and its write."""
    num_inside = most = 0

    def app(environ, start_response):
        nonlocal num_inside, most
        num_inside += 1
        most = max(most, num_inside)
        time.sleep(0.01)
        num_inside -= 1
        return [environ["wsgi.input"].read()]

    server = OneAtATime(app)
    answers = []
    threads = [
        threading.Thread(
            target=lambda: answers.extend(server({"wsgi.input": io.BytesIO(b"12"), "CONTENT_LENGTH": "2"}, None))
        )
        for _ in range(4)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()

    assert most == 1 and answers == [b"12"] * 4


def test_an_object_is_not_stored_in_part(s3, s3_server):
    """A connection that ends within the body changes nothing."""
    connection = http.client.HTTPConnection(urlsplit(s3_server).netloc, timeout=10)
    connection.putrequest("PUT", f"/{s3.name}/run/a")
    connection.putheader("Authorization", "AWS4-HMAC-SHA256 Credential=a-key/20260101/us-east-1/s3/aws4_request")
    connection.putheader("Content-Length", "10")
    connection.endheaders(b"12345")
    connection.close()

    assert s3.names() == []
