"""A proxy between a client and an HTTP server that injects faults of the network and of the server.

:func:`running` starts it in a process of its own, and yields a :class:`Proxy`, which sets the rules and
reads the counts.
"""

import contextlib
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from tests.server_process import serving

DROPPED, LOST, DELAYED, GONE = "request dropped", "response lost", "delayed", "server gone"
SHORT_REQUEST, SHORT_RESPONSE = "request truncated", "response truncated"
ERROR, SLOW_DOWN, DENIED = "500", "503", "403"


@dataclass(frozen=True)
class Rule:
    """A fault and the requests that it strikes.

    Attributes:
        kind: one of the constants above.
        probability: of the fault, at each request that matches.
        nth: strike exactly this one of the requests that match, counted from 1; without `probability`.
        method: regular expression of the whole method.
        path: regular expression, searched in the path with its query.
        seconds: duration of `DELAYED` and `GONE`.
    """

    kind: str
    probability: float = 1.0
    nth: int | None = None
    method: str = ".*"
    path: str = ""
    seconds: float = 0.0

    def matches(self, method: str, path: str) -> bool:
        return bool(re.fullmatch(self.method, method) and re.search(self.path, path))


@dataclass(frozen=True)
class Proxy:
    """Client of a running proxy.

    Attributes:
        url: where clients connect instead of to the server.
        control: URL of the control channel, which is never struck by a fault.
    """

    url: str
    control: str

    def set(self, *rules: Rule, seed: int = 0) -> None:
        """Replace the rules; the first that strikes a request counts. No rules: no faults."""
        self._order({"rules": [asdict(each) for each in rules], "seed": seed})

    def leave(self, seconds: float) -> None:
        """Refuse connections from now on, for a time."""
        self._order({"gone_s": seconds})

    @property
    def counts(self) -> Counter[str]:
        """Number of injected faults of each kind."""
        return Counter(self._report()["counts"])

    @property
    def num_requests(self) -> int:
        """Number of requests received, struck or not."""
        return int(self._report()["num_requests"])

    def _report(self) -> Any:
        with _OPENER.open(self.control, timeout=30) as answer:
            return json.load(answer)

    def _order(self, order: dict[str, Any]) -> None:
        request = urllib.request.Request(self.control, json.dumps(order).encode(), method="PUT")
        _OPENER.open(request, timeout=30).close()


_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy of the environment


@contextlib.contextmanager
def running(server: str) -> Iterator[Proxy]:
    """Start a proxy in front of a server, given by its URL, in another process."""
    with serving("tests.faults.proxy_server", server) as line:
        yield Proxy(*line.split())
