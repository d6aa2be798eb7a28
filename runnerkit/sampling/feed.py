"""The loader behind a shard: the shard shows the user's data set, and the feed yields the batches."""

from __future__ import annotations

import copy
from typing import Any

from torch.utils.data import DataLoader

from runnerkit.sampling.loader_worker import WorkerStart
from runnerkit.sampling.share import LoaderShare
from runnerkit.support.torch_internals import forget_length


def with_feed(shard: DataLoader[Any], share: LoaderShare, **replaced: Any) -> DataLoader[Any]:
    """Give `shard`, which shows the user's data set, the loader that its batches really come from."""
    # DataLoader cannot be changed after __init__, and calling __init__ again would lose what a subclass or the
    # user set. A copy of its attributes keeps workers, collate_fn, generator and everything else.
    feed = copy.copy(shard)
    vars(feed).update(replaced)
    feed._iterator = shard._iterator = None  # persistent workers belong to one loader
    forget_length(feed)
    feed.worker_init_fn = WorkerStart(shard.worker_init_fn)
    vars(shard).update(_feed=feed, _share=share)
    return shard


def feed_of(loader: Any) -> Any:
    """Return the loader that yields the batches of one from :func:`shard_loader`; any other loader unchanged."""
    return getattr(loader, "_feed", loader)
