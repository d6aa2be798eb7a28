"""The side of the cluster's node in a job on Ray: the actor that is a rank."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from runnerkit.engines.launch import worker
from runnerkit.engines.launch.spawn import RESULT
from runnerkit.loop.stop_signals import FOLDER_VARIABLE
from runnerkit.support import pickling

Files: TypeAlias = "dict[str, np.ndarray[Any, Any]]"  # name and bytes: Ray passes arrays on without copying them


@dataclass
class Met:
    """Answer of a rank's process to the first call.

    Attributes:
        port: free port of its machine.
        folder: where the files of the job are, if it is the first process of its node.
    """

    pid: int = 0
    port: int = 0
    gpus: tuple[str, ...] = ()
    folder: str = ""


class RankActor:
    """Actor: one process of the job. Ray puts its representation before each line that it prints."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._reserved = reserved_port()

    def __repr__(self) -> str:
        return f"rank {self._rank}"

    def meet(self, files: Files | None) -> Met:
        """Return what the others need to know; the first process of a node is given the files, for all of them."""
        import ray

        if files is not None:
            self._folder = tempfile.TemporaryDirectory(prefix="runnerkit-")
            write_files(files, Path(self._folder.name))
        port = self._reserved.getsockname()[1]
        if sys.platform != "linux":  # where the socket would be in rank zero's way
            self._reserved.close()
        gpus = tuple(map(str, ray.get_gpu_ids()))
        return Met(os.getpid(), port, gpus, self._folder.name if self._folder else "")

    def call(self, variables: dict[str, str], folder: str) -> tuple[int, Files]:
        """Call the function; return the exit code, and the files of the result or the failure."""
        job = _enter(variables, folder)
        return worker.call(job), self._reports(job)

    def stream(self, variables: dict[str, str], folder: str) -> Iterator[bytes | tuple[int, Files]]:
        """Yield the function's values, pickled, and at the end what :meth:`call` returns."""
        job = _enter(variables, folder)
        with worker.reported(job) as outcome, closing(worker.payload_of(job)()) as values:
            for value in values:
                yield pickling.dumps(value)
        yield outcome.code, self._reports(job)

    def close(self) -> None:
        """Delete the files of the job on this node, and give the port back."""
        self._reserved.close()
        if self._folder is not None:
            self._folder.cleanup()

    def _reports(self, job: Path) -> Files:
        own = (f"done.{self._rank}", f"failure.{self._rank}", *([f"{RESULT}*"] if self._rank == 0 else []))
        return read_files(path for pattern in own for path in job.glob(pattern))


def _enter(variables: dict[str, str], folder: str) -> Path:
    """Set the environment of the rank, and what else it has of the calling process; return the job's folder."""
    os.environ.update(variables)
    job = Path(variables[FOLDER_VARIABLE])
    resemble_caller(os.fsdecode((job / "path").read_bytes()).split("\0"), folder)
    sys.modules["__main__"] = ModuleType("__main__")  # instead of Ray's, for what the caller's one defines
    return job


def reserved_port() -> socket.socket:
    """Return a socket bound to a free port, which Linux gives to nobody else; this program may listen there."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("", 0))
    return reserved


def resemble_caller(paths: Iterable[str], folder: str) -> None:
    """Extend the module search path by the calling process's one, and enter its folder, if that is here."""
    sys.path += [path for path in paths if path not in sys.path]
    with suppress(OSError):
        os.chdir(folder)


def read_files(paths: Iterable[Path]) -> Files:
    return {path.name: np.fromfile(path, dtype=np.uint8) for path in paths}


def write_files(files: Files, folder: Path) -> None:
    for name, content in files.items():
        content.tofile(folder / name)
