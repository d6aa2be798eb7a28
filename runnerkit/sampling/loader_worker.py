"""A loader's worker among signals: those that are meant for its run, and the one that kills it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_LOOK_EVERY_S = 5.0
_NEWS_S = 1.0  # from a killed worker's last file to its parent's signal, on a busy machine


class WorkerStart:
    """A ``worker_init_fn`` that lets the worker serve a run which was asked to stop until it has.

    Slurm, torchrun and ``kill -- -PGID`` send SIGTERM and SIGUSR1 to the workers as well, a closed terminal SIGHUP.
    Were they gone at once, so would be the step that is to be saved. What the loader's own process sends ends the
    worker, as it does without this.
    A program that the data set starts inherits the mask: end it by SIGKILL.

    The worker ends some seconds after the loader's process, also if that was killed before the worker had begun:
    torch's takes whoever is its parent by then for the loader's process, and would outlive it for ever.

    Args:
        init_fn: the user's.
    """

    def __init__(self, init_fn: Callable[[int], None] | None) -> None:
        self.init_fn = init_fn
        self._owner = os.getpid()

    def __call__(self, worker_id: int) -> None:
        if sys.platform == "linux":
            numbers = {signal.SIGTERM, *filter(_is_free, (signal.SIGUSR1, signal.SIGHUP))}
            signal.pthread_sigmask(signal.SIG_BLOCK, numbers)  # before the thread, which inherits the mask
            threading.Thread(target=_wait, args=(numbers, self._owner), name="runnerkit-signals", daemon=True).start()
        if self.init_fn is not None:
            self.init_fn(worker_id)


def naming_the_dead(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield a loader's batches; raise what killed its worker rather than what is seen of that first.

    The system closes a killed worker's sockets, from which a batch may just be read, a moment before it tells this
    process. Upon that torch raises wherever this process is by then: in the middle of writing down why it fails, say.
    """
    try:
        yield from batches
    except (ConnectionError, EOFError):
        time.sleep(_NEWS_S)  # torch raises in it
        raise


def _wait(numbers: set[signal.Signals], owner: int) -> None:
    while True:
        # Tells who sent it, which a handler of Python's does not.
        received = signal.sigtimedwait(numbers, _LOOK_EVERY_S)
        if received is None:
            if not _is_there(owner):
                os._exit(1)
        elif received.si_signo == signal.SIGTERM and received.si_pid == owner:
            os._exit(0)


def _is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _is_free(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return handler == signal.SIG_DFL or getattr(handler, "__module__", "") == "runnerkit.preemption"
