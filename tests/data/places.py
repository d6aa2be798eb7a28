"""Shares of a loader for the processes of a job, all within this process."""

from itertools import zip_longest

from runnerkit.data import EpochStepsLoaderWrapper
from runnerkit.sampling.sharding import shard_loader, start_epoch

SEED = 42


def share(loader, rank=0, world_size=1, *, epoch=1, training=True, key="train", steps=None):
    """Return a rank's share. `epoch` has begun in it, unless it is None; `steps` cuts epochs."""
    place = {"key": key, "training": training, "rank": rank, "world_size": world_size, "seed": SEED}
    found = EpochStepsLoaderWrapper(loader, steps).shard(**place) if steps else shard_loader(loader, **place)
    if epoch is not None:
        start_epoch(found, epoch)
    return found


def shares(loader, world_size, **options):
    """Return the share of each rank."""
    return [share(loader, rank, world_size, **options) for rank in range(world_size)]


def flat(lists):
    return [each for one in lists for each in one]


def joined(ranks):
    """Join the batches of all ranks as one process with larger batches would see them."""
    steps = zip_longest(*ranks, fillvalue=[])
    return [[each for group in zip_longest(*step) for each in group if each is not None] for step in steps]
