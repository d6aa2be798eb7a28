"""A loader that copies batches to the GPU while it computes."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Self

import torch
from torch.utils.data import DataLoader

from runnerkit.data.loader_wrapper import LoaderWrapper
from runnerkit.sampling.sharding import batches_of
from runnerkit.support.arguments import check_integers
from runnerkit.support.device_move import move
from runnerkit.types import Batch

__all__ = ["BatchPrefetchLoaderWrapper"]


class BatchPrefetchLoaderWrapper(LoaderWrapper):
    """A loader that copies the next batches to the GPU on a separate stream while the current one is processed.

    The engine sets the device and enables ``pin_memory`` of a wrapped DataLoader, without which copies do not overlap
    with computation. In a hand-written loop the device is the current GPU. On a CPU batches are passed through.

    Each prefetched batch takes memory on the GPU. If fetching a batch fails, the batches before it are still yielded,
    then the error is raised. Random draws of ``collate_fn`` in this process (``num_workers=0``) happen
    `num_prefetches` batches earlier.

    Args:
        loader: any loader; it yields the same samples in the same order as without prefetching.
        num_prefetches: batches to prefetch; None is one, which suffices if a copy takes less time than a step.

    >>> list(BatchPrefetchLoaderWrapper([torch.zeros(1), torch.ones(1)]).for_device(torch.device("cpu")))
    [tensor([0.]), tensor([1.])]
    """

    def __init__(self, loader: Any, num_prefetches: int | None = None) -> None:
        super().__init__(loader)
        check_integers(self, or_none=True, num_prefetches=num_prefetches)
        self.num_prefetches = num_prefetches or 1
        self.device: torch.device | None = None

    def for_device(self, device: torch.device) -> Self:
        held = super().for_device(device).origin
        placed = self._with_origin(_pinning(held) if device.type == "cuda" else held)
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
            except Exception as error:  # raised after the batches that come before it
                failure = error
            if not ahead:
                break
            batch, arrived = ahead.popleft()
            torch.cuda.current_stream(device).wait_event(arrived)  # the GPU waits, this thread does not
            yield batch
            del batch  # frees its memory for the next one
        if failure is not None:
            try:
                raise failure
            finally:
                del failure  # its traceback references this frame


def _send(batch: Batch, device: torch.device, stream: torch.cuda.Stream) -> tuple[Batch, torch.cuda.Event]:
    # Work queued so far may still use an earlier batch whose memory the next one reuses, so the copy waits for it and
    # overlaps only with work queued later. Memory is then safe for batches of any structure and, unlike with
    # record_stream, is freed at a point that does not depend on the speed of the GPU.
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        return move(batch, device), stream.record_event()  # pyright: ignore[reportReturnType]  # of a base


def _pinning(loader: Any) -> Any:
    """Return a copy of a DataLoader, also of a wrapped one, with ``pin_memory`` enabled."""
    if isinstance(loader, LoaderWrapper):
        return loader._with_origin(_pinning(loader.origin))
    if not isinstance(loader, DataLoader) or loader.pin_memory:
        return loader
    pinning = copy.copy(loader)
    pinning.pin_memory = True
    pinning._iterator = None  # persistent workers belong to a single loader
    if "_feed" in vars(loader):
        vars(pinning)["_feed"] = _pinning(vars(loader)["_feed"])
    return pinning
