"""Batches on their way to the GPU while it computes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from runnerkit.data.loader_wrapper import LoaderWrapper
from runnerkit.engine import move
from runnerkit.sampling.sharding import batches_of
from runnerkit.types import Batch


class BatchPrefetchLoaderWrapper(LoaderWrapper):
    """Copy the next batches to the GPU, on a stream of their own, while the present one is computed on.

    The engine says which device that is, and turns on ``pin_memory`` of a DataLoader inside, without which a copy runs
    beside nothing. In a loop of your own it is the current GPU. On a CPU the held loader's batches come as they are.

    Each batch in advance takes its memory on the GPU. One that cannot be fetched raises when it is due: those before it
    are handed out. What ``collate_fn`` draws in this process (``num_workers=0``) is drawn so many batches earlier.

    Args:
        loader: any loader; of a DataLoader, each sample is seen as often and in the same order as without.
        num_prefetches: batches in advance; None is one, enough if a copy takes less than a step.

    >>> list(BatchPrefetchLoaderWrapper([torch.zeros(1), torch.ones(1)]).for_device(torch.device("cpu")))
    [tensor([0.]), tensor([1.])]
    """

    def __init__(self, loader: Any, num_prefetches: int | None = None) -> None:
        super().__init__(loader)
        if num_prefetches is not None and num_prefetches < 1:
            raise ValueError(f"num_prefetches must be >= 1, got {num_prefetches}")
        self.num_prefetches = num_prefetches or 1
        self.device: torch.device | None = None

    def for_device(self, device: torch.device) -> Self:
        held = super().for_device(device).origin
        placed = self._around(_pinning(held) if device.type == "cuda" else held)
        placed.device = device
        return placed

    def __iter__(self) -> Iterator[Batch]:
        device = self.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        iterator = batches_of(self.origin)
        return self._copied(iterator, device) if device.type == "cuda" else iterator

    def _copied(self, iterator: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
        stream = torch.cuda.Stream(device)
        ahead: deque[tuple[Batch, torch.cuda.Event]] = deque()
        failure: Exception | None = None
        while True:
            try:
                missing = 0 if failure else self.num_prefetches + 1 - len(ahead)
                ahead.extend(_send(each, device, stream) for each in islice(iterator, missing))
            except Exception as error:  # of a batch that is not due yet
                failure = error
            if not ahead:
                break
            batch, arrived = ahead.popleft()
            torch.cuda.current_stream(device).wait_event(arrived)  # the GPU waits, this thread does not
            yield batch
            del batch  # its memory is for the next one
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback holds this frame


def _send(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    # What has been queued so far may use an earlier batch whose memory the next one gets: the copy comes after it, and
    # beside what will be queued from now on. So memory is safe whatever a batch is made of, and, other than with
    # record_stream, is free again at a point that does not depend on how fast the GPU is.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return move(batch, device, path="batch"), stream.record_event()  # pyright: ignore[reportReturnType]  # of a base


def _pinning(loader: Any) -> Any:
    """Turn ``pin_memory`` of a DataLoader on, in a copy; of one in a wrapper too."""
    if isinstance(loader, LoaderWrapper):
        return loader._around(_pinning(loader.origin))
    if not isinstance(loader, DataLoader) or loader.pin_memory:
        return loader
    pinning = copy.copy(loader)
    pinning.pin_memory = True
    pinning._iterator = None  # persistent workers belong to one loader
    if "_feed" in vars(loader):
        vars(pinning)["_feed"] = _pinning(vars(loader)["_feed"])
    return pinning
