"""Processes started as a launcher starts them, all on the first device of this machine."""

import os
import socket
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.on_gpu.check import Failed, Setting


def run_ranks(module: str, num_processes: int, setting: Setting) -> dict[str, Any]:
    """Call `rank_main(setting)` of a module in new processes; return the result of rank zero, which is saved by torch.

    Raises:
        Failed: a process failed; its output is printed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    job = {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.pth"
        command = [sys.executable, "-m", __name__, module, setting.device_type, str(path)]
        processes = [
            subprocess.Popen(command, env={**os.environ, **job, "RANK": str(rank)}) for rank in range(num_processes)
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise Failed(f"the processes ended with exit codes {codes}")
        result: dict[str, Any] = torch.load(path, weights_only=True)
        return result


def main(module: str, device_type: Literal["cuda", "cpu"], path: str) -> None:
    """Run one rank."""
    result = import_module(module).rank_main(Setting(device_type))
    if os.environ["RANK"] == "0":
        torch.save(result, path)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]  # run_ranks passes a device type
