"""Tools to test progress bars: a terminal for programs, a clock, and metrics that raise when read."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

import pyte
import pytest
import torch

from tests.callbacks.stand_ins import make_runner

ROOT = Path(__file__).parents[2]
NUM_LINES, NUM_COLUMNS = 60, 120
UNREADABLE = {"loss": torch.empty((), device="meta")}  # reading a value from the meta device raises


def assert_reads_metrics_only_when_due(callback, clock, refresh_s, written=lambda: ""):
    """Run batches through a progress callback, which may read metrics and write only after `refresh_s` seconds."""
    runner = make_runner(loader_batch_len=100, loader_batch_step=1)
    callback.on_stage_start(runner)
    callback.on_epoch_start(runner)
    callback.on_loader_start(runner)
    runner.batch_metrics = {"loss": torch.tensor(0.5)}
    callback.on_batch_end(runner)
    before = written()

    runner.batch_metrics = UNREADABLE
    for _ in range(50):
        clock.now += refresh_s / 100
        callback.on_batch_end(runner)
    assert written() == before

    clock.now += refresh_s
    with pytest.raises((NotImplementedError, RuntimeError)):
        callback.on_batch_end(runner)
    callback.on_exception(runner)


@dataclass
class Shown:
    """The output of a program.

    Attributes:
        text: the raw output.
        screen: the non-empty lines on the screen at the end.
    """

    text: str
    screen: list[str]


def run_in_terminal(script: Path, *arguments: str) -> Shown:
    """Run a Python script whose standard output and error are a terminal; raise if it fails."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", NUM_LINES, NUM_COLUMNS, 0, 0))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *arguments]
    with subprocess.Popen(
        command, cwd=script.parent, env=environment, stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs
    ) as process:
        try:
            os.close(theirs)
            text = _read(ours).decode()
            code = process.wait(30)  # the program has closed its output
        finally:
            process.kill()
            os.close(ours)
    assert code == 0, text
    screen = pyte.Screen(NUM_COLUMNS, NUM_LINES)
    pyte.Stream(screen).feed(text)
    return Shown(text, [line.rstrip() for line in screen.display if line.strip()])


def _read(file: int) -> bytes:
    """Read until the other side closes."""
    parts = []
    while True:
        try:
            part = os.read(file, 65536)
        except OSError:  # Linux reports a closed terminal this way
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)
