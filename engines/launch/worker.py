"""Entry point of processes that runnerkit.engines.launch.spawn starts, with a job's folder and the parent's id."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from runnerkit.engines.failures.failure import describe, no_silent_exit
from runnerkit.engines.launch.exit_on_signal import ExitOnSignal
from runnerkit.engines.launch.parent import die_with_parent
from runnerkit.engines.launch.payload import names_in_main, pack, remove_files, unpack
from runnerkit.engines.launch.spawn import PAYLOAD, RESULT
from runnerkit.support import pickling
from runnerkit.torchvision_cpu import import_torchvision, lacks_operators


def main(folder: Path, parent: int) -> int:
    """Call the payload's function, write its result or failure to `folder`, and return the exit code."""
    die_with_parent()
    if os.getppid() != parent:  # it has already died
        os._exit(1)
    return call(folder)


def call(folder: Path) -> int:
    """Do the same in a process that somebody else ends."""
    with reported(folder) as outcome:
        result = payload_of(folder)()
        if outcome.rank == 0:
            pack(result, folder / RESULT)
    return outcome.code


class Outcome:
    """End of a rank's work.

    Attributes:
        code: exit code; 0 until it fails.
    """

    def __init__(self) -> None:
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.code = 0


@contextmanager
def reported(folder: Path) -> Iterator[Outcome]:
    """Write to `folder` whether the body succeeded or what it raised, which ends here."""
    end = ExitOnSignal()
    end.install()
    _silence_broken_pipes(end)
    _fork_loader_workers()
    outcome = Outcome()
    rank, world_size = outcome.rank, outcome.world_size
    try:
        with no_silent_exit(rank, world_size):
            yield outcome
        (folder / f"done.{rank}").touch()
    except GeneratorExit:  # the body is a generator that nobody reads to its end
        raise
    except BaseException as error:
        if end.has_fired:
            outcome.code = 128 + signal.SIGTERM  # the parent is ending the job; errors on the way are expected
            return
        ExitOnSignal.ignore()  # the parent must get the report, even if it ends the job meanwhile
        # Before any teardown: the parent uses the time stamp to tell the cause from its consequences.
        describe(error, rank=rank, world_size=world_size).write(folder)
        outcome.code = 1


def payload_of(folder: Path) -> Callable[[], Any]:
    """Return the function to call; the last process of this machine that has it deletes its files."""
    sys.argv = json.loads((folder / "argv").read_text())  # the user's command, for user code and logs
    try:
        function = unpack(folder / PAYLOAD)
    except (RuntimeError, ImportError) as error:
        # Something in it, such as torchmetrics, imports torchvision, which was patched in the calling process only.
        if not lacks_operators(error):
            raise
        import_torchvision()
        function = unpack(folder / PAYLOAD)
    pickling.refer_to_main(names_in_main(folder / PAYLOAD))  # what is pickled from now on goes back to the caller
    (folder / f"read.{os.environ['RANK']}").touch()
    if len(list(folder.glob("read.*"))) == int(os.environ["LOCAL_WORLD_SIZE"]):
        remove_files(folder / PAYLOAD)
    return function  # type: ignore[no-any-return]


def _fork_loader_workers() -> None:
    """Fork a loader's workers, as Python before 3.14 does: a fork server cannot import what __main__ defines."""
    if multiprocessing.get_start_method() == "forkserver":
        multiprocessing.set_start_method("fork", force=True)


def _silence_broken_pipes(end: ExitOnSignal) -> None:
    """Suppress tracebacks of the threads that multiprocessing runs for a loader when the job is ended."""
    owner = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_pipe_of_a_loader = os.getpid() != owner and issubclass(kind, ConnectionError | EOFError)
        if not end.has_fired and not is_pipe_of_a_loader:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def _leave(code: int) -> NoReturn:
    """Exit like Python but without C++ destructors, in which threads of a destroyed process group would abort."""
    ExitOnSignal.ignore()  # it is ending already
    if code == 0:  # after a failure, do not delay the other ranks
        threading._shutdown()  # type: ignore[attr-defined]  # finish work that other threads are doing
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run() -> NoReturn:
    """Run :func:`main` with the arguments of the command line, and exit."""
    _leave(main(Path(sys.argv[1]), int(sys.argv[2])))
