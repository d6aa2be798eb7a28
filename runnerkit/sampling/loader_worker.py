"""Signals in a loader's worker: those meant for its run, and the one that kills it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from runnerkit.support.platform import ASKS_A_RUN, exists
from runnerkit.support.torch_internals import raise_if_a_worker_was_killed

_POLL_S = 5.0
_SIGCHLD_S = 10.0  # from a killed worker's closed sockets to the signal of its parent, on a busy machine
_RAISED_IN_WORKER = "in DataLoader worker process"  # torch's words in an error that a worker has reported


class WorkerStart:
    """A ``worker_init_fn`` that keeps the worker alive until a run that was asked to stop has stopped.

    Slurm, torchrun and ``kill -- -PGID`` send SIGTERM and SIGUSR1 to the workers as well, a closed terminal SIGHUP.
    If workers ended immediately, the step to be saved would be lost. A SIGTERM from the loader's own process ends the
    worker, as usual.
    A program that the data set starts inherits the signal mask: end it with SIGKILL.

    The worker ends a few seconds after the loader's process, even if that was killed before the worker started:
    torch's own check mistakes the worker's new parent for the loader's process, so the worker would never end.

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


def watch_workers(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield a loader's batches; if a worker was killed, raise that error instead of its first symptom.

    The system closes a killed worker's sockets, from which a batch may be being read, a moment before it notifies this
    process. Torch then raises wherever this process is, for example while it records why it failed, or in a finalizer,
    where its error is lost.
    """
    try:
        yield from batches
    except (ConnectionError, EOFError) as error:
        deadline = time.monotonic() + _SIGCHLD_S
        while _RAISED_IN_WORKER not in str(error) and time.monotonic() < deadline:
            raise_if_a_worker_was_killed()
            time.sleep(0.05)
        raise


def _wait(numbers: set[signal.Signals], owner: int) -> None:
    while True:
        # Returns the sender, which a Python signal handler does not get.
        received = signal.sigtimedwait(numbers, _POLL_S)
        if received is None:
            if not exists(owner):
                os._exit(1)
        elif received.si_signo == signal.SIGTERM and received.si_pid == owner:
            os._exit(0)


def _is_free(number: signal.Signals) -> bool:
    handler = signal.getsignal(number)
    return handler == signal.SIG_DFL or getattr(handler, ASKS_A_RUN, False)
