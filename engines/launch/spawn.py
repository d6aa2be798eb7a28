"""Launching of a job's processes on this machine from plain python: start, wait, end together."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from runnerkit.engines.failures.failure import WorkerError, cause_of_end, is_cause_known
from runnerkit.engines.launch.exit_on_signal import ExitOnSignal
from runnerkit.engines.launch.parent import is_stopped
from runnerkit.engines.launch.payload import pack, unpack
from runnerkit.engines.process_environment import STORE_VARIABLE
from runnerkit.loop.stop_signals import FOLDER_VARIABLE, Stopped, handling_stop_signals, pass_on, stopped_by

T = TypeVar("T")
ChildProcesses = list["subprocess.Popen[bytes]"]

PAYLOAD, RESULT = "payload", "result"  # files in the folder of a job
# Sets the module search path before any import: `sys` is built in, but a file in this folder may be named json.py.
_RANK_CODE = """import sys
with open(sys.argv[1] + "/path", encoding=sys.getfilesystemencoding(), errors="surrogateescape") as file:
    sys.path[:] = file.read().split("\\0")
from runnerkit.engines.launch.worker import run
run()
"""
POLL_S = 0.02
_WAIT_S = 0.2  # until the calling process looks for failure reports again
_REPORT_S = 0.3  # time to notice a process that died at the same moment, and for its report to be written
_CAUSE_S = 5.0  # the same if all others report only that they lost it
_REPEAT_S = 0.1
AFTER_FAILURE_S = 90.0  # time for a failed process to end, including its on_exception hooks
_GRACE_S = 3.0  # from SIGTERM (close files) to SIGKILL; a process that waits for a dead peer does not handle SIGTERM


def spawn(
    fn: Callable[[], T],
    *,
    num_processes: int,
    variables: dict[str, str],
    variables_of: Callable[[int], dict[str, str]] = lambda rank: {},
) -> T:
    """Call `fn` in `num_processes` new processes; return rank zero's result.

    The main script is not imported again, so it does not need ``if __name__ == "__main__":``.

    Args:
        fn: function to call; it is pickled with all it refers to.
        variables: environment variables besides RANK, WORLD_SIZE and their local forms; without MASTER_ADDR, the
            processes meet in a file.
        variables_of: returns further variables for a rank.
    Raises:
        TypeError: `fn` refers to something that cannot be pickled.
        Exception: what the first failing process raised; the others are ended.
        WorkerError: a process was killed.
    """
    return result_of(started(fn, num_processes=num_processes, variables=variables, variables_of=variables_of))  # type: ignore[no-any-return]


def result_of(started_job: AbstractContextManager[Any]) -> Any:
    """Wait for the processes of a job and return rank zero's result; pass stop signals on to them.

    Args:
        started_job: context whose value is a :class:`Job`, or has its attributes and methods.
    Raises:
        Exception: see :func:`spawn`.
    """
    with started_job as job, handling_stop_signals(job.ask_to_stop):
        try:
            while not job.is_over():
                job.wait()
        except BaseException as error:
            raise (_response_to_signal(error, job.asked) if job.asked else error) from error.__cause__
        result = unpack(job.folder / RESULT)
    if job.asked:  # the processes had already finished: the signal is for the caller
        signal.raise_signal(job.asked)
    return result


def _response_to_signal(error: BaseException, number: int) -> BaseException:
    """Convert the error of processes that a signal ended into the calling process's response to that signal."""
    if isinstance(error, Stopped):
        return stopped_by(number)
    if isinstance(error, WorkerError | SystemExit):
        return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)
    return error


class Job:
    """Running processes.

    Attributes:
        folder: folder of their result and failure reports.
        processes: the processes by rank.
        asked: the signal that asked the job to stop, if there was one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: ChildProcesses = []
        self.asked: int | None = None
        self._failed_at: float | None = None

    def is_over(self) -> bool:
        """Return whether all processes have ended successfully.

        Raises:
            Exception: what the first failing process raised.
            WorkerError: a process was killed.
        """
        by_rank = self._exit_codes()
        codes = by_rank.values()
        if self._is_overdue():
            raise cause_of_end(self.folder, by_rank)
        if any(codes) or (all(code == 0 for code in codes) and _count_done(self.folder) < len(codes)):
            self._wait_for_reports()
            error = cause_of_end(self.folder, self._exit_codes())
            stopped = [rank for rank, process in enumerate(self.processes) if is_stopped(process.pid)]
            if stopped:
                raise WorkerError(
                    f"rank {stopped[0]} of {len(codes)} is stopped (by SIGSTOP or a debugger) while others wait for it"
                ) from error
            raise error
        return all(code == 0 for code in codes)

    def wait(self) -> None:
        """Wait until a process ends, for at most 0.2 s; the ranks use every core, so waking up would slow them down."""
        with ExitStack() as stack:
            ends = select.poll()
            try:
                for process in self.processes:
                    if process.returncode is None:
                        descriptor = os.pidfd_open(process.pid)
                        stack.callback(os.close, descriptor)
                        ends.register(descriptor, select.POLLIN)
            except (AttributeError, OSError):  # not Linux, or a sandbox forbids it
                time.sleep(POLL_S)
            else:
                ends.poll(_WAIT_S * 1000)

    def ask_to_stop(self, number: int) -> None:
        """Pass a signal on, within its handler: the processes save and stop by themselves, and :meth:`wait` is long."""
        self.asked = number
        pass_on(number, self.folder)
        for process in self.processes:
            process.terminate()

    def _wait_for_reports(self) -> None:
        time.sleep(_REPORT_S)
        deadline = time.monotonic() + _CAUSE_S
        while not is_cause_known(self.folder, codes := self._exit_codes()) and time.monotonic() < deadline:
            if None not in codes.values():
                return
            time.sleep(POLL_S)

    def _exit_codes(self) -> dict[int, int | None]:
        return {rank: process.poll() for rank, process in enumerate(self.processes)}

    def _is_overdue(self) -> bool:
        """Return whether a failed process should have ended by now: a loader's worker or a hook may hang."""
        if self._failed_at is None and any(self.folder.glob("failure.*")):
            self._failed_at = time.monotonic()
        return self._failed_at is not None and time.monotonic() - self._failed_at > AFTER_FAILURE_S


@contextmanager
def started(
    fn: Callable[[], Any],
    *,
    num_processes: int,
    variables: dict[str, str],
    variables_of: Callable[[int], dict[str, str]] = lambda rank: {},
    descriptors: Sequence[int] = (),
) -> Iterator[Job]:
    """Start the processes for :func:`spawn`, and end them all when the context exits.

    Args:
        descriptors: file descriptors that the processes inherit, one per rank.
    """
    with job_folder(fn) as folder:
        job = Job(folder)
        # Always set, as it also identifies runnerkit as the launcher.
        variables = {**variables, STORE_VARIABLE: "" if "MASTER_ADDR" in variables else str(job.folder / "store")}
        try:
            for rank in range(num_processes):
                own = {**variables, **variables_of(rank)}
                job.processes.append(_start(job.folder, rank, num_processes, own, descriptors[rank : rank + 1]))
            yield job
        finally:
            _end(job.processes)


@contextmanager
def job_folder(fn: Callable[[], Any]) -> Iterator[Path]:
    """Make a folder with what the processes of a job need of this one; SIGTERM unwinds this context."""
    with tempfile.TemporaryDirectory(prefix="runnerkit-") as name, _sigterm_as_exit():
        folder = Path(name)
        pack(fn, folder / PAYLOAD, fills_main=True)
        (folder / "argv").write_text(json.dumps(sys.argv))
        # In a file: PYTHONPATH would also reach programs that the user's code starts, and break another Python.
        (folder / "path").write_bytes(
            os.fsencode("\0".join(path or os.getcwd() for path in sys.path if isinstance(path, str)))
        )
        yield folder


def _start(
    folder: Path, rank: int, num_processes: int, variables: dict[str, str], descriptors: Sequence[int]
) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        **variables,
        FOLDER_VARIABLE: str(folder),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
    }
    # Ranks that all use every core would slow each other down.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    command = [sys.executable, "-c", _RANK_CODE, str(folder), str(os.getpid())]
    # A separate process group: Ctrl-C reaches only the calling process, which then ends the others.
    return subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, process_group=0, pass_fds=descriptors)


def _count_done(folder: Path) -> int:
    return len(list(folder.glob("done.*")))


def _end(processes: ChildProcesses) -> None:
    deadline = time.monotonic() + _GRACE_S
    while (left := [process for process in processes if process.poll() is None]) and time.monotonic() < deadline:
        for process in left:
            process.terminate()  # repeatedly: the first may be handled as a request to save
        time.sleep(_REPEAT_S)
    for process in processes:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the rest of its group too: workers of its loaders
        process.wait()


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM, unless the user handles it, into an exit that ends the other processes first."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    handler = ExitOnSignal()
    handler.install()
    try:
        yield
    finally:
        handler.remove()
