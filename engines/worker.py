"""A process that runnerkit.engines.spawn started: ``python -m runnerkit.engines.worker FOLDER PARENT``."""

import ctypes
import os
import signal
import sys
from pathlib import Path

from runnerkit.engines.failure import describe
from runnerkit.engines.payload import pack, unpack
from runnerkit.engines.spawn import ExitOnSignal


def main(folder: Path, parent: int) -> int:
    """Call the payload's function; leave what it returned or raised in `folder`; return the exit code."""
    _die_with(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and sends SIGTERM
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end = ExitOnSignal()
    signal.signal(signal.SIGTERM, end)
    # Threads that a loader left (multiprocessing's own) complain of pipes that break when the job is ended.
    sys.excepthook = lambda *error: None if end.has_fired else sys.__excepthook__(*error)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        result = unpack((folder / "payload").read_bytes())()
        if rank == 0:
            (folder / "result").write_bytes(pack(result))
    except BaseException as error:
        if end.has_fired:
            return 128 + signal.SIGTERM  # the parent is ending the job; whatever broke on the way is no news
        # Before anything else is torn down: by its time stamp the parent tells cause from consequence.
        describe(error, rank=rank, world_size=world_size).write(folder)
        return 1
    return 0


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent dies, however it dies (Linux)."""
    if sys.platform != "linux":
        return
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG of prctl(2)
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
