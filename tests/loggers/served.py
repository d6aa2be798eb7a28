"""A TensorBoard server, started as users start it and stopped with all of its processes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def serve(logdir: Path) -> Iterator[str]:
    """Run TensorBoard on a free port; yield its address."""
    command = [
        *(sys.executable, "-u", "-m", "tensorboard.main", "--logdir", str(logdir)),
        *("--host", "127.0.0.1", "--port", "0", "--samples_per_plugin", "scalars=999999"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            addresses = (re.search(r"at (http://\S+) \(Press", line) for line in process.stdout)
            yield next(address[1] for address in addresses if address)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # its data server is a separate process


def fetch(address: str, run: str, tag: str, *, num_points: int, timeout_s: float = 120) -> list[tuple[int, float]]:
    """Query the HTTP API until it has loaded this many points."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # local: never use a proxy
    points: list[Any] = []
    deadline = time.monotonic() + timeout_s
    while len(points) < num_points and time.monotonic() < deadline:
        time.sleep(0.1)
        try:
            url = f"{address}data/plugin/scalars/scalars?run={run}&tag={tag}"
            with opener.open(url, timeout=timeout_s) as response:
                points = json.load(response)
        except urllib.error.HTTPError as error:  # not loaded yet
            error.close()
    return [(x, value) for _, x, value in points]
