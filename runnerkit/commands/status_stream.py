"""`runnerkit watch --json`: the status of a run, each time that it changes, until the run ends."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from runnerkit.storage.remote.copies import local_copy
from runnerkit.storage.remote.urls import as_url, shown
from runnerkit.storage.status_file import FILE, read_status

STORE_EVERY_S = 10.0  # a run uploads its logs less often than that


def statuses(logdir: str | os.PathLike[str], *, once: bool = False, every_s: float = 2.0) -> Iterator[dict[str, Any]]:
    """Yield the status of a run whenever it changed, the last one when the run is not running anymore, or is unknown.

    Args:
        logdir: folder or URL of one run.
        once: yield the current one only.
        every_s: seconds between two looks at the file.
    Raises:
        FileNotFoundError: `logdir` lacks a status file.
    """
    before: dict[str, Any] | None = None
    while True:
        folder = local_copy(logdir, logs_only=True)
        status = read_status(folder)
        if status is None:
            raise FileNotFoundError(
                f"{shown(folder)} does not contain {FILE}: expected the logdir of a run that has begun"
            )
        if status != before:
            yield status
        if once or status["state"] != "running":
            return
        before = status
        time.sleep(every_s if as_url(logdir) is None else max(every_s, STORE_EVERY_S))
