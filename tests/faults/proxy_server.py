"""The process of the proxy that injects faults; see :mod:`tests.faults.proxy`.

``python -m tests.faults.proxy_server SERVER`` prints its URL and that of its control channel, and serves until its
standard input is closed.
"""

import contextlib
import http.client
import json
import random
import socket
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.faults import proxy as kinds
from tests.faults.proxy import Rule
from tests.free_port import free_port

CODES = {kinds.ERROR: "InternalError", kinds.SLOW_DOWN: "SlowDown", kinds.DENIED: "InvalidAccessKeyId"}
OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "expect", "proxy-connection", "te", "upgrade"}


class Faults:
    """The rules in force, and the number of faults injected so far; shared by the threads of a proxy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rules: list[Rule] = []
        self._num_matches: list[int] = []
        self._chance = random.Random()
        self._counts: Counter[str] = Counter()
        self._num_requests = 0

    def set(self, rules: list[Rule], seed: int) -> None:
        with self._lock:
            self._rules, self._num_matches, self._chance = rules, [0] * len(rules), random.Random(seed)

    def draw(self, method: str, path: str) -> Rule | None:
        """Return the first rule that strikes a request."""
        with self._lock:
            self._num_requests += 1
            struck = None
            for index, rule in enumerate(self._rules):
                if not rule.matches(method, path):
                    continue
                self._num_matches[index] += 1
                due = self._num_matches[index] == rule.nth if rule.nth else self._chance.random() < rule.probability
                struck = struck or (rule if due else None)
            return struck

    def count(self, kind: str) -> None:
        with self._lock:
            self._counts[kind] += 1

    def report(self) -> dict[str, Any]:
        with self._lock:
            return {"num_requests": self._num_requests, "counts": dict(self._counts)}


@dataclass(frozen=True)
class Response:
    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes
    is_head: bool = False

    def raw(self) -> bytes:
        """Return the bytes of the response; its length is declared, also to a HEAD, as the server declared it."""
        headers = [(name, value) for name, value in self.headers if name.lower() not in OF_THE_CONNECTION]
        if not self.is_head and not any(name.lower() == "content-length" for name, _ in headers):
            headers.append(("Content-Length", str(len(self.body))))
        lines = [f"HTTP/1.1 {self.status} {self.reason}", *(f"{name}: {value}" for name, value in headers)]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


class Handler(BaseHTTPRequestHandler):
    """Connection of a client: its requests are read whole, one at a time, and each is forwarded or struck."""

    protocol_version = "HTTP/1.1"
    server: "ProxyServer"

    def do_any(self) -> None:
        body = self._body()
        faults = self.server.faults
        rule = faults.draw(self.command, self.path)
        kind = rule and rule.kind
        if rule is not None:
            faults.count(rule.kind)
            if kind == kinds.DELAYED:
                time.sleep(rule.seconds)
            if kind == kinds.GONE:
                self.server.leave(rule.seconds)
        if kind in (kinds.DROPPED, kinds.GONE):
            self._reset()
        elif kind in CODES:
            self._answer(_error(str(kind), self.path, is_head=self.command == "HEAD"))
        elif kind == kinds.SHORT_REQUEST:
            self.server.forward(self.command, self.path, self.headers.items(), body, num_bytes=len(body) // 2)
            self._reset()
        else:
            self._forward(kind, body)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = do_any  # noqa: N815

    def _forward(self, kind: str | None, body: bytes) -> None:
        response = self.server.forward(self.command, self.path, self.headers.items(), body)
        if response is None or kind == kinds.LOST:
            self._reset()
            return
        if kind == kinds.SHORT_RESPONSE:
            self._truncate(response)
        else:
            self._answer(response)

    def _answer(self, response: Response) -> None:
        self.wfile.write(response.raw())

    def _truncate(self, response: Response) -> None:
        """Send half of the body, or half of the headers of a response without a body."""
        raw, size = response.raw(), len(response.body)
        self.wfile.write(raw[: len(raw) - (size + 1) // 2 if size else len(raw) // 2])
        self.close_connection = True  # without a reset, which may discard what was sent

    def _reset(self) -> None:
        """Reset the connection, as a router or a crashed server does."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", "").lower():
            return self._bytes(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self._bytes(size))
            self.rfile.readline()
        while self.rfile.readline().strip():  # trailers
            pass
        return b"".join(chunks)

    def _bytes(self, size: int) -> bytes:
        found = self.rfile.read(size)
        if len(found) < size:  # the client was killed; what it began to send must not become a whole request
            raise ConnectionAbortedError
        return found

    def handle(self) -> None:
        # A client that was killed, or that ended the connection because of a fault.
        with contextlib.suppress(ConnectionError, ValueError, TimeoutError):
            super().handle()

    def finish(self) -> None:
        with contextlib.suppress(ConnectionError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        pass


class ProxyServer(ThreadingHTTPServer):
    """The proxy: forwards requests to a server, and stops listening while it is gone."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, server: str) -> None:
        super().__init__(("127.0.0.1", free_port()), Handler)
        self.faults = Faults()
        self._target = server.removeprefix("http://").rstrip("/")
        self._listening = threading.Event()
        self._gone_until = 0.0
        self._clients: set[socket.socket] = set()

    def forward(
        self, method: str, path: str, headers: Any, body: bytes, num_bytes: int | None = None
    ) -> Response | None:
        """Send a request, or its headers and the first bytes of its body; return None without a response."""
        to_server = http.client.HTTPConnection(self._target, timeout=60)
        try:
            to_server.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in headers:
                if name.lower() not in {*OF_THE_CONNECTION, "content-length"}:
                    to_server.putheader(name, value)
            to_server.putheader("Content-Length", str(len(body)))
            to_server.endheaders(body[:num_bytes])
            if num_bytes is not None and num_bytes < len(body):
                return None
            response = to_server.getresponse()
            content = response.read()
            return Response(response.status, response.reason, response.getheaders(), content, method == "HEAD")
        except (OSError, http.client.HTTPException):
            return None
        finally:
            to_server.close()

    def leave(self, seconds: float) -> None:
        """Refuse connections for a time, and end those that are open."""
        self._gone_until = max(self._gone_until, time.monotonic() + seconds)

    def serve(self) -> None:
        """Accept connections, except while the server is gone."""
        self.socket.settimeout(0.02)
        while True:
            if self._gone_until > time.monotonic():
                self._be_gone()
            self.handle_request()

    def _be_gone(self) -> None:
        self.server_close()
        for client in list(self._clients):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        while (left := self._gone_until - time.monotonic()) > 0:
            time.sleep(min(left, 0.02))
        self.socket = socket.socket(self.address_family, self.socket_type)
        self.server_bind()
        self.server_activate()
        self.socket.settimeout(0.02)

    def get_request(self) -> tuple[socket.socket, Any]:
        client, address = super().get_request()
        client.setblocking(True)
        self._clients.add(client)
        return client, address

    def close_request(self, request: Any) -> None:
        self._clients.discard(request)
        super().close_request(request)

    def shutdown_request(self, request: Any) -> None:
        self.close_request(request)  # a shutdown would end the connection in order, before the reset


class Control(BaseHTTPRequestHandler):
    """Control channel: GET returns the counts, PUT sets the rules or makes the server leave."""

    server: "ControlServer"

    def do_GET(self) -> None:
        self._send(self.server.proxy.faults.report())

    def do_PUT(self) -> None:
        order = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "gone_s" in order:
            self.server.proxy.faults.count(kinds.GONE)
            self.server.proxy.leave(order["gone_s"])
        else:
            self.server.proxy.faults.set([Rule(**each) for each in order["rules"]], order["seed"])
        self._send({})

    def _send(self, answer: Any) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        pass


class ControlServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: ProxyServer) -> None:
        super().__init__(("127.0.0.1", free_port()), Control)
        self.proxy = proxy


def _error(kind: str, path: str, *, is_head: bool) -> Response:
    """Return an error in S3's form."""
    body = (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{CODES[kind]}</Code><Message>injected</Message>"
        f"<Resource>{path.partition('?')[0]}</Resource><RequestId>1</RequestId></Error>"
    ).encode()
    headers = [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))]
    return Response(int(kind), CODES[kind], headers, b"" if is_head else body, is_head)


def main() -> None:
    """Serve until standard input is closed."""
    proxy = ProxyServer(sys.argv[1])
    control = ControlServer(proxy)
    for serve in (proxy.serve, control.serve_forever):
        threading.Thread(target=serve, daemon=True).start()
    print(f"http://127.0.0.1:{proxy.server_port} http://127.0.0.1:{control.server_port}", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
