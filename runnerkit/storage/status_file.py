"""``status.json`` in a logdir: the state of a run, for schedulers and other programs that poll it."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from runnerkit.storage.atomic_file import write_text
from runnerkit.support.platform import exists
from runnerkit.support.strict_json import strict_json

FILE = "status.json"
FORMAT_VERSION = 1
SILENT_S = 60.0  # without an update, a run is reported as silent; it writes far more often
_QUIET_S = 15.0  # without an update, three times as long as a run takes, its process is looked for
_TOLERANCE_S = 5.0  # of the ages of a process and of its last update, by two clocks
_LOST_S = 300.0  # without an update, the state of a run whose process cannot be looked for is unknown

State = Literal["running", "finished", "failed", "stopped"]


@dataclass(frozen=True)
class Status:
    """The content of the file; ``runnerkit schema status`` prints its JSON schema.

    Attributes:
        state: "stopped" after a signal, Ctrl-C, `max_hours` or ``sys.exit``; a killed run stays "running".
        pid, host: of the process of rank zero.
        started_at, updated_at: in UTC, ISO 8601; of this start of the run, and of this content.
        stage: its name, "train" by default.
        loader: key of the current or last loader; None before the first one.
        epoch: 1, 2, ... over all stages.
        stage_epoch, num_epochs: the epoch within the stage, and the number of its epochs, if it is known.
        step: number of training batches so far, as in the logs.
        optimizer_step, num_steps: number of optimizer steps so far, and of those of the stage, if it is known.
        metrics: of the last pass over each loader, by its key.
        error: type and message of the exception that ended the run.
    """

    state: State
    pid: int
    host: str
    started_at: str
    updated_at: str
    stage: str
    loader: str | None
    epoch: int
    stage_epoch: int
    num_epochs: int | None
    step: int
    optimizer_step: int
    num_steps: int | None
    metrics: dict[str, dict[str, float]]
    error: dict[str, str] | None = None

    def write(self, logdir: Path) -> None:
        """Replace the file atomically.

        Raises:
            OSError: the file cannot be written.
        """
        write_text(logdir / FILE, strict_json({"format_version": FORMAT_VERSION, **asdict(self)}) + "\n")


def now() -> str:
    """Return the time in UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def folders_with_status(folder: Path) -> list[Path]:
    """Return the logdirs at and below `folder` that have the file, sorted."""
    return [file.parent for file in sorted(folder.rglob(FILE))]


def read_status(logdir: Path) -> dict[str, Any] | None:
    """Read the file, in which the state of a run becomes "killed" if its process on this machine has ended.

    A run that has just written the file is alive: in a container with the name of this host, its process has another
    number here. On another machine, a run becomes "unknown" without an update for five minutes.

    Returns:
        None if the file does not exist, or is damaged.

    >>> import tempfile
    >>> read_status(Path(tempfile.mkdtemp())) is None
    True
    """
    with suppress(OSError, ValueError, TypeError, KeyError):
        status: dict[str, Any] = json.loads((logdir / FILE).read_text(encoding="utf-8"))
        is_here = status["host"] == socket.gethostname() and sys.platform != "win32"  # there os.kill would end it
        if status["state"] == "running" and _age_s(status) > (_QUIET_S if is_here else _LOST_S):
            if not is_here:
                status["state"] = "unknown"
            elif _has_ended(int(status["pid"]), silent_s=_age_s(status)):
                status["state"] = "killed"
        return status
    return None


def describe(status: dict[str, Any]) -> str:
    """Describe a status in a few words.

    >>> describe({"state": "failed", "error": {"type": "ValueError", "message": "ValueError: no\\nIn epoch 1"}})
    'failed: ValueError: no'
    """
    state = str(status.get("state"))
    if state == "running" and (silent_s := _age_s(status)) > SILENT_S:
        return f"running, but without an update for {silent_s:.0f} s"
    if state == "killed":
        return f"killed: process {status['pid']} has ended, last update {status.get('updated_at')}"
    if state == "unknown":
        return f"unknown: on {status['host']}, without an update for {_age_s(status):.0f} s"
    error = status.get("error")
    return f"{state}: {error['message'].partition(chr(10))[0]}" if error else state


def _age_s(status: dict[str, Any]) -> float:
    with suppress(KeyError, TypeError, ValueError):
        return (datetime.now(UTC) - datetime.fromisoformat(status["updated_at"])).total_seconds()
    return 0.0


def _has_ended(pid: int, *, silent_s: float) -> bool:
    """Return whether a process has ended; on Linux also if its parent has not read how, or its number is in use again.

    Args:
        silent_s: seconds since it wrote; a younger process is another one.
    """
    if not exists(pid):
        return True
    if sys.platform == "linux":
        with suppress(OSError, ValueError, IndexError):  # /proc may hide it
            # The name of the program, in parentheses, may contain any character.
            fields = Path("/proc", str(pid), "stat").read_text(errors="replace").rpartition(")")[2].split()
            age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
            return fields[0] in ("Z", "X") or age_s < silent_s - _TOLERANCE_S
    return False
