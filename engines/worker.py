"""A process that runnerkit.engines.spawn started, with the job's folder and its own process as arguments."""

from __future__ import annotations

import atexit
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from runnerkit.engines.exit_on_signal import ExitOnSignal
from runnerkit.engines.failure import describe, no_silent_exit
from runnerkit.engines.parent import die_with_parent
from runnerkit.engines.payload import pack, remove, unpack
from runnerkit.engines.spawn import PAYLOAD, RESULT
from runnerkit.torchvision_cpu import MISSING_OP, import_torchvision


def main(folder: Path, parent: int) -> int:
    """Call the payload's function; leave what it returned or raised in `folder`; return the exit code."""
    die_with_parent()
    if os.getppid() != parent:  # it died before
        os._exit(1)
    end = ExitOnSignal()
    end.install()
    _silence_broken_pipes(end)
    _fork_loader_workers()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        with no_silent_exit(rank, world_size):
            result = _payload(folder, rank, world_size)()
        if rank == 0:
            pack(result, folder / RESULT)
        (folder / f"done.{rank}").touch()
    except BaseException as error:
        if end.has_fired:
            return 128 + signal.SIGTERM  # the parent is ending the job; whatever broke on the way is no news
        ExitOnSignal.ignore()  # the parent must learn why, even if it ends the job meanwhile
        # Before anything else is torn down: by its time stamp the parent tells cause from consequence.
        describe(error, rank=rank, world_size=world_size).write(folder)
        return 1
    return 0


def _payload(folder: Path, rank: int, world_size: int) -> Callable[[], Any]:
    sys.argv = json.loads((folder / "argv").read_text())  # the user's command, as user code and logs know it
    try:
        function = unpack(folder / PAYLOAD)
    except RuntimeError as error:
        # Something in it (torchmetrics, say) imports torchvision, which the calling process had cured.
        if MISSING_OP not in str(error):
            raise
        import_torchvision()
        function = unpack(folder / PAYLOAD)
    (folder / f"read.{rank}").touch()
    if len(list(folder.glob("read.*"))) == world_size:
        remove(folder / PAYLOAD)
    return function  # type: ignore[no-any-return]


def _fork_loader_workers() -> None:
    """Start a loader's workers as Python before 3.14 does: a fork server could not import what __main__ defines."""
    if multiprocessing.get_start_method() == "forkserver":
        multiprocessing.set_start_method("fork", force=True)


def _silence_broken_pipes(end: ExitOnSignal) -> None:
    """Keep threads that multiprocessing runs for a loader from complaining when the job is ended."""
    owner = os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_pipe_of_a_loader = os.getpid() != owner and issubclass(kind, ConnectionError | EOFError)
        if not end.has_fired and not is_pipe_of_a_loader:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook


def _leave(code: int) -> NoReturn:
    """Exit as Python does, but for the C++ destructors: threads of a process group that is gone abort in them."""
    ExitOnSignal.ignore()  # it does end
    if code == 0:  # after a failure others wait
        threading._shutdown()  # type: ignore[attr-defined]  # work that was handed to other threads is done first
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run() -> NoReturn:
    """Be the process whose command line this is, to its end."""
    _leave(main(Path(sys.argv[1]), int(sys.argv[2])))
