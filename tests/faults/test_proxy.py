"""Each fault of the proxy, as a plain client sees it."""

import contextlib
import http.client
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest

from tests.faults import proxy as faults
from tests.faults.proxy import Rule


class Origin(BaseHTTPRequestHandler):
    """A server that keeps what it receives, and answers with it."""

    protocol_version = "HTTP/1.1"

    def do_any(self):
        size = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(size)
        if len(body) < size:
            self.server.truncated.append(body)
            return
        self.server.received.append((self.command, self.path, body))
        content = b"echo " + (body or str(len(self.server.received)).encode())
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = do_any  # noqa: N815

    def log_message(self, *_):
        pass


@pytest.fixture
def origin():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Origin)
    server.received, server.truncated = [], []
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def proxy(origin):
    with faults.running(f"http://127.0.0.1:{origin.server_port}") as running:
        yield running


def connected(proxy):
    return contextlib.closing(http.client.HTTPConnection(urlsplit(proxy.url).netloc, timeout=10))


def ask(proxy, method="GET", path="/a", body=None):
    """Send one request over a new connection; return the status and the body."""
    with connected(proxy) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()


def test_without_rules_all_is_forwarded(proxy, origin):
    """Several requests use one connection; a chunked body arrives whole."""
    requests = (("PUT", b"1234"), ("HEAD", None), ("POST", iter([b"12", b"34"])), ("DELETE", None))
    answers = []
    with connected(proxy) as connection:
        for method, body in requests:
            connection.request(method, "/a?b=%20c", body, encode_chunked=True)
            answers.append(connection.getresponse().read())

    assert answers == [b"echo 1234", b"", b"echo 1234", b"echo 4"]
    assert [received[:2] for received in origin.received] == [(method, "/a?b=%20c") for method, _ in requests]
    assert origin.received[2][2] == b"1234"
    assert not proxy.counts and proxy.num_requests == 4


@pytest.mark.parametrize(("head", "body"), [("Content-Length: 4", b"12"), ("Transfer-Encoding: chunked", b"4\r\n12")])
def test_what_a_killed_client_began_to_send_is_not_forwarded(proxy, origin, head, body):
    host, port = urlsplit(proxy.url).netloc.split(":")
    with socket.create_connection((host, int(port))) as client:
        client.sendall(f"PUT /a HTTP/1.1\r\nHost: a\r\n{head}\r\n\r\n".encode() + body)

    assert ask(proxy, path="/b") == (200, b"echo 1")
    assert [path for _, path, _ in origin.received] == ["/b"]


@pytest.mark.parametrize(
    ("kind", "received"), [(faults.DROPPED, []), (faults.LOST, [("PUT", "/a", b"1234")]), (faults.SHORT_REQUEST, [])]
)
def test_a_request_or_its_response_is_lost(proxy, origin, kind, received):
    """The server sees nothing of a dropped request, half of a truncated one, and acts if the response is lost."""
    proxy.set(Rule(kind))

    with pytest.raises(ConnectionResetError):
        ask(proxy, "PUT", "/a", b"1234")

    deadline = time.monotonic() + 10
    while kind == faults.SHORT_REQUEST and not origin.truncated and time.monotonic() < deadline:
        time.sleep(0.01)
    assert origin.truncated == ([b"12"] if kind == faults.SHORT_REQUEST else [])
    assert origin.received == received and proxy.counts == {kind: 1}


def test_an_answer_is_delayed(proxy):
    proxy.set(Rule(faults.DELAYED, seconds=0.3))
    began = time.monotonic()

    assert ask(proxy) == (200, b"echo 1")

    assert time.monotonic() - began >= 0.3 and proxy.counts == {faults.DELAYED: 1}


def test_a_response_is_truncated(proxy, origin):
    """Its declared length is that of the whole."""
    proxy.set(Rule(faults.SHORT_RESPONSE))

    with pytest.raises(http.client.IncompleteRead) as caught:
        ask(proxy, "PUT", "/a", b"12345")

    assert caught.value.partial == b"echo " and caught.value.expected == 5
    assert len(origin.received) == 1 and proxy.counts == {faults.SHORT_RESPONSE: 1}
    with connected(proxy) as connection:  # a response without a body is truncated in its headers
        connection.request("HEAD", "/a")
        assert connection.getresponse().getheader("Content-Length") is None


@pytest.mark.parametrize(
    ("kind", "status", "code"),
    [(faults.ERROR, 500, b"InternalError"), (faults.SLOW_DOWN, 503, b"SlowDown"), (faults.DENIED, 403, b"InvalidAcc")],
)
def test_the_proxy_answers_with_an_error(proxy, origin, kind, status, code):
    """In S3's form, which a HEAD does not get."""
    proxy.set(Rule(kind))

    answered, body = ask(proxy, "PUT", "/a", b"1234")

    assert answered == status and b"<Code>" + code in body
    assert ask(proxy, "HEAD") == (status, b"")
    assert origin.received == [] and proxy.counts == {kind: 2}


def status_of(proxy):
    """Ask; return None if nobody listens."""
    with contextlib.suppress(ConnectionError):
        return ask(proxy)[0]


@pytest.mark.parametrize("by_request", [False, True])
def test_the_server_is_gone_for_a_time(proxy, origin, by_request):
    """Connections are refused, also ones that were open, and come back on the same port."""
    with connected(proxy) as connection:
        connection.request("GET", "/a")
        connection.getresponse().read()
        if by_request:
            proxy.set(Rule(faults.GONE, nth=1, seconds=3))
            with pytest.raises(ConnectionError):
                ask(proxy)
        else:
            proxy.leave(3)
        time.sleep(0.2)
        with pytest.raises(ConnectionRefusedError):
            ask(proxy)
        with pytest.raises(ConnectionError):
            connection.request("GET", "/a") or connection.getresponse()
    deadline = time.monotonic() + 20
    while (status := status_of(proxy)) is None and time.monotonic() < deadline:
        time.sleep(0.1)

    assert status == 200
    assert len(origin.received) == 2 and proxy.counts == {faults.GONE: 1}


def test_a_rule_strikes_the_nth_request_that_matches(proxy):
    """By method and path; the first rule that strikes counts."""
    manifests = Rule(faults.SLOW_DOWN, nth=2, method="PUT", path=r"manifest\.json$")
    proxy.set(manifests, Rule(faults.ERROR, method="P.*T", path="/b"))
    requests = [("PUT", "/manifest.json"), ("GET", "/manifest.json"), ("PUT", "/manifest.json"), ("POST", "/b/c")]

    found = [ask(proxy, *each)[0] for each in [*requests, requests[2]]]

    assert found == [200, 200, 503, 500, 200]


def test_random_faults_follow_the_seed(proxy):
    def statuses(seed):
        proxy.set(Rule(faults.ERROR, probability=0.3), seed=seed)
        return [ask(proxy)[0] for _ in range(30)]

    first = statuses(1)

    assert first == statuses(1) != statuses(2)
    assert 2 < first.count(500) < 20
