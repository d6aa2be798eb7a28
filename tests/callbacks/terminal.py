"""A terminal for tests: a program runs in it, and its screen is read as a user reads it."""

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

ROOT = Path(__file__).parents[2]
NUM_LINES, NUM_COLUMNS = 60, 120


@dataclass
class Shown:
    """What a program wrote.

    Attributes:
        text: all of it, as it came.
        screen: lines that stand there at the end, without empty ones.
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
            code = process.wait(30)  # it has closed its output
        finally:
            process.kill()
            os.close(ours)
    assert code == 0, text
    screen = pyte.Screen(NUM_COLUMNS, NUM_LINES)
    pyte.Stream(screen).feed(text)
    return Shown(text, [line.rstrip() for line in screen.display if line.strip()])


def _read(file: int) -> bytes:
    """Read until nobody writes any more."""
    parts = []
    while True:
        try:
            part = os.read(file, 65536)
        except OSError:  # how Linux ends a terminal
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)
