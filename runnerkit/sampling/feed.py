"""The loader behind a process's own one: that shows the user's data set, and the feed yields the batches."""

from __future__ import annotations

import copy
import logging
from typing import Any

import torch
from torch.utils.data import DataLoader

from runnerkit.sampling.loader_members import LoaderMembers, SamplerMembers
from runnerkit.sampling.loader_worker import WorkerStart
from runnerkit.sampling.share import LoaderShare
from runnerkit.support.torch_internals import forget_length

logger = logging.getLogger(__name__)


class OuterLoader:
    """Base class of loaders that wrap another one.

    Attributes:
        origin: the wrapped loader.
    """

    origin: Any


def with_feed(own: DataLoader[Any], share: LoaderShare, **replaced: Any) -> DataLoader[Any]:
    """Give `own`, which shows the user's data set, the loader that its batches really come from."""
    # DataLoader cannot be changed after __init__, and calling __init__ again would lose what a subclass or the
    # user set. A copy of its attributes keeps workers, collate_fn, generator and everything else.
    feed = copy.copy(own)
    vars(feed).update(replaced)
    feed._iterator = own._iterator = None  # persistent workers belong to one loader
    forget_length(feed)
    feed.worker_init_fn = WorkerStart(own.worker_init_fn)
    # Batches are counted, for the position and for the weight of short ones.
    if own.num_workers > 1 and not LoaderMembers(own).in_order:
        feed.in_order = True
        if getattr(share, "rank", 0) == 0:
            logger.warning("a loader's in_order=False is ignored: its batches come in order, so that a run can resume")
    vars(own).update(_feed=feed, _share=share)
    return own


def feed_of(loader: Any) -> Any:
    """Return the loader that yields the batches of one from :func:`shard_loader`; any other loader unchanged."""
    return getattr(loader, "_feed", loader)


def for_device(loader: Any, device: torch.device) -> Any:
    """Return a loader for a process that computes on `device`: a copy if the loader has ``for_device``, else itself."""
    place = LoaderMembers(loader).for_device
    return place(device) if callable(place) else loader


def samplers_of(loader: Any) -> tuple[Any, Any, Any]:
    """Return a loader's sampler, its batch sampler, and the sampler within that; None for each that it lacks."""
    members = LoaderMembers(loader)
    batch_sampler = members.batch_sampler
    return members.sampler, batch_sampler, SamplerMembers(batch_sampler).sampler
