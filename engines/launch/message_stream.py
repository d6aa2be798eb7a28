"""Streaming of values that spawned processes yield to the calling process, round by round."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any, TypeAlias, TypeVar

from runnerkit.engines.failures.failure import WorkerError
from runnerkit.engines.launch.spawn import POLL_S, Job, started
from runnerkit.support import pickling

T = TypeVar("T")
Values: TypeAlias = Generator[T, None, None]

_MAX_AHEAD = 2  # values per process that the calling process has not received yet
_CHANNEL_VARIABLE = "RUNNERKIT_CHANNEL"
_END = b""


def spawn_rounds(
    fn: Callable[[], Values[T]],
    *,
    num_processes: int,
    variables: dict[str, str],
    variables_of: Callable[[int], dict[str, str]] = lambda rank: {},
) -> Iterator[list[T]]:
    """Iterate `fn()` in new processes; yield here what the engine's ``gather_rounds`` would yield there.

    Each process sends its values directly to this one and pauses when it is two values ahead, so processes do not wait
    for each other. Closing the generator early ends the processes.

    Args:
        fn, num_processes, variables, variables_of: see :func:`runnerkit.engines.launch.spawn.spawn`.
    Raises:
        Exception: as spawn does.
    """
    with ExitStack() as stack:
        ends = [Pipe() for _ in range(num_processes)]
        for pair in ends:
            for end in pair:
                stack.enter_context(end)
        channels = [mine for mine, _ in ends]
        theirs = [end.fileno() for _, end in ends]
        job = stack.enter_context(
            started(
                _Sender(fn),
                num_processes=num_processes,
                variables=variables,
                variables_of=lambda rank: {**variables_of(rank), _CHANNEL_VARIABLE: str(theirs[rank])},
                descriptors=theirs,
            )
        )
        for _, end in ends:
            end.close()
        yield from _receive_rounds(job, channels)
        while not job.is_over():
            job.wait()


def _receive_rounds(job: Job, channels: list[Any]) -> Iterator[list[Any]]:
    going_on = dict(enumerate(channels))
    while going_on:
        values = []
        for rank, channel in list(going_on.items()):
            message = _receive(job, rank, channel)
            if message == _END:
                del going_on[rank]
            else:
                values.append(pickling.loads(message))
                with suppress(ConnectionError):  # it has already sent its last value and ended
                    channel.send_bytes(b"taken")
        if values:
            yield values


def _receive(job: Job, rank: int, channel: Connection) -> bytes:
    has_ended = False
    while not channel.poll(POLL_S):
        if has_ended:
            raise _silent_end(rank)
        job.is_over()  # raises what a process raised
        has_ended = job.processes[rank].poll() is not None
    try:
        return channel.recv_bytes()
    except (EOFError, ConnectionError):
        job.processes[rank].wait()
        job.is_over()
        raise _silent_end(rank) from None


def _silent_end(rank: int) -> WorkerError:
    return WorkerError(f"rank {rank} ended early, with code 0 and no exception (os._exit?)")


class _Sender:
    """Sender in a spawned process: sends each value of an iterator as soon as there is room for it."""

    def __init__(self, fn: Callable[[], Values[Any]]) -> None:
        self.fn = fn

    def __call__(self) -> None:
        """Send all values."""
        num_ahead = 0
        with Connection(int(os.environ[_CHANNEL_VARIABLE])) as channel, closing(self.fn()) as values:
            for value in values:
                if num_ahead == _MAX_AHEAD:
                    channel.recv_bytes()
                    num_ahead -= 1
                channel.send_bytes(pickling.dumps(value))
                num_ahead += 1
                del value
            channel.send_bytes(_END)
