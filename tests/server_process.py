"""A server in a process of its own, which survives when a process that uses it is forked or killed."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def serving(module: str, *arguments: str, is_nice: bool = False) -> Iterator[str]:
    """Run a module that prints one line when it is ready, until its standard input is closed; yield the line.

    Args:
        is_nice: leave the processor to others.
    """
    command = [*(["nice"] if is_nice else []), sys.executable, "-m", module, *arguments]
    root = Path(__file__).parents[1]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdin is not None and server.stdout is not None
        try:
            line = server.stdout.readline().strip()
            assert line, f"{module} did not start: exit code {server.wait()}"
            yield line
        finally:
            server.terminate()  # forks of this process may still hold its standard input
