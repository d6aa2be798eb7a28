"""The S3 server of the tests behaves as S3 does where the package relies on it."""

import http.client
import io
import threading
import time
from urllib.parse import urlsplit

from tests.storage.s3_server import OneAtATime


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

    def ask():
        answers.extend(server({"wsgi.input": io.BytesIO(b"12"), "CONTENT_LENGTH": "2"}, None))

    threads = [threading.Thread(target=ask) for _ in range(4)]
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
