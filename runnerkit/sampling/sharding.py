"""Each process's share of a loader, with all attributes that the user set."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from inspect import signature
from typing import Any, Literal, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from runnerkit.sampling.epochs import set_epoch
from runnerkit.sampling.feed import OuterLoader, feed_of, samplers_of, with_feed
from runnerkit.sampling.indexed.sampler import Places, ShardedBatches, ShardedBatchSampler, tells_its_length
from runnerkit.sampling.loader_members import DatasetMembers, LoaderMembers, SamplerMembers
from runnerkit.sampling.loader_worker import watch_workers
from runnerkit.sampling.seeded_dataset import SeededDataset, is_seeded
from runnerkit.sampling.share import AdaptedShare, LoaderShare, WholeLoader
from runnerkit.seeding.generators import derive_seed
from runnerkit.support.iterators import started
from runnerkit.support.plain_values import attributes_of
from runnerkit.support.torch_internals import length_of, unpacks_within, without_records

logger = logging.getLogger(__name__)

Uneven: TypeAlias = Literal["drop", "pad"]  # an argument of 0.1, without effect

_WHOLE = WholeLoader()


def shard_loader(
    loader: Any, *, key: str, training: bool, rank: int, world_size: int, seed: int, endless: bool = False
) -> Any:
    """Return this process's share of `loader`, keeping every attribute that the user set.

    A DistributedSampler set by the user is kept. Any loader other than a DataLoader must have a method
    ``shard(*, key, training, rank, world_size, seed)`` that returns its share; one process does not need it.
    A sampler without length may be endless: it is never exhausted, and a single process uses its loader unchanged,
    like that of a subclass that keeps an iterator.

    Args:
        loader: a DataLoader (or subclass), any iterable of batches, or a range, of which every process gets all.
        key: the loader's.
        training: whether the batches are for training, so that all processes need the same number.
        seed: determines order and random numbers, together with the key and the epoch.
        endless: whether a stream of shards may start again where it ends, as its epochs are cut by `epoch_steps`.
    Raises:
        TypeError: with several processes, a loader that cannot be sharded exactly.
    """
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "seed": seed}
    if LoaderMembers(loader).pipeline is not None:  # of WebDataset, whose loaders are pipelines too
        from runnerkit.sampling.streams.sharding import loader_in

        loader = loader_in(loader, key=key)
    if callable(LoaderMembers(loader).shard):
        known = signature(loader.shard).parameters
        if endless and "endless" in known:  # a wrapper
            place["endless"] = True
        if "uneven" in known:  # an argument of 0.1, without effect
            place["uneven"] = "drop"
        share = loader.shard(key=key, training=training, **place)
        if isinstance(sampler := share_of(share), ShardedBatchSampler):
            sampler.training = training  # the loader may have made it without this argument, as in 0.1
        return share
    if isinstance(loader, range):
        from runnerkit.sampling.rounds import Rounds  # late, as few runs need it

        return Rounds(loader)
    if not isinstance(loader, DataLoader):
        if world_size > 1:
            raise TypeError(
                f"loader {key!r} is a {type(loader).__name__} and cannot be shared among {world_size} processes; use a "
                "DataLoader, or give it a method shard(*, key, training, rank, world_size, seed) that returns "
                "a share"
            )
        return loader
    place["seed"] = loader_seed(seed, key)
    iterator = _kept_iterator(loader)
    if iterator is not None and distributed_sampler_of(loader) is None:
        if world_size > 1:
            raise TypeError(
                f"loader {key!r}: {type(loader).__name__} overrides __iter__ and keeps an iterator over all samples, "
                f"{iterator!r}, and so cannot be shared among {world_size} processes; use a DataLoader with "
                "persistent_workers=True, or make the iterator in __iter__"
            )
        return loader
    if isinstance(loader.dataset, IterableDataset):
        from runnerkit.sampling.streams.sharding import share_stream  # late, as few runs need it

        return share_stream(loader, key=key, training=training, endless=endless, **place)
    own = distributed_sampler_of(loader)
    if own is not None:
        of_sampler = attributes_of(own)
        made_for = of_sampler.get("rank"), of_sampler.get("num_replicas")
        if None not in made_for and made_for != (rank, world_size):
            logger.warning(
                "loader %r: its %s is that of rank %d of %d, in rank %d of %d, so samples are missed or repeated, "
                "unless each machine has data of its own; make it in get_loaders, from self.engine, or leave it out",
                key, type(own).__name__, *made_for, rank, world_size,
            )  # fmt: skip
        elif not training and len(loader.dataset) % world_size:  # type: ignore[arg-type]  # map-style: it has a length
            logger.warning(
                "loader %r: its own DistributedSampler repeats samples to fill %d processes; these are scored twice; "
                "remove the sampler for exact evaluation",
                key,
                world_size,
            )
        return loader
    if count_batches(loader) is None:
        if world_size > 1:
            raise TypeError(
                f"loader {key!r}: its {_sampler_name(loader)} does not have a length, may never end, and so cannot be "
                f"shared among {world_size} processes; make it end after an epoch and give it a __len__, or use an "
                "IterableDataset"
            )
        return loader
    share_samples = _share_indices if DatasetMembers(loader.dataset).lane_order is None else _share_files
    return share_samples(loader, key=key, training=training, **place)


def loader_seed(seed: int, key: str) -> int:
    """Derive the seed of a loader, so that two loaders of the same length, as in a GAN, are shuffled differently."""
    return derive_seed(seed, "loader", key)


def distributed_sampler_of(loader: Any) -> DistributedSampler[Any] | None:
    """Return the DistributedSampler that the user gave to a loader, if any."""
    return next((each for each in samplers_of(loader) if isinstance(each, DistributedSampler)), None)


def _kept_iterator(loader: DataLoader[Any]) -> str | None:
    """Return the name of the attribute in which a subclass keeps an iterator, which a copy would share."""
    if type(loader).__iter__ is DataLoader.__iter__:
        return None
    own = vars(loader).keys() - {"_iterator", "dataset", "sampler", "batch_sampler"}  # which a share replaces
    return next((name for name in sorted(own) if isinstance(vars(loader)[name], Iterator)), None)


def _sampler_name(loader: DataLoader[Any]) -> str:
    is_own = loader.batch_size is None and loader.batch_sampler is not None
    return type(loader.batch_sampler if is_own else loader.sampler).__name__


def _batches_alike(loader: DataLoader[Any]) -> bool:
    """Return whether a loader's batches are consecutive samples of a sampler."""
    batches = loader.batch_sampler
    # batch_size is None if the user passed a batch sampler; a subclass may have replaced the loader's.
    return isinstance(batches, BatchSampler) and (loader.batch_size is not None or type(batches) is BatchSampler)


def _share_indices(loader: DataLoader[Any], *, key: str, training: bool, **place: Any) -> DataLoader[Any]:
    """Distribute samples, or whole batches of a custom batch sampler."""
    batches: Any = loader.batch_sampler
    share: ShardedBatchSampler | ShardedBatches
    if _batches_alike(loader):
        sampler: Any = batches.sampler
        share = ShardedBatchSampler(
            sampler, batch_size=batches.batch_size, drop_last=batches.drop_last, training=training, **place
        )
        check_share = DatasetMembers(loader.dataset).check_share
        if check_share is not None:
            try:
                check_share(sampler, share.stride)
            except ValueError as error:
                raise ValueError(f"loader {key!r}: {error}") from error
            share.needs_whole_steps = True
    else:
        whole = loader.sampler if batches is None else batches
        share = ShardedBatches(whole, is_batch_sampler=batches is not None, training=training, **place)
    return _with_order(loader, share)


def _share_files(loader: DataLoader[Any], *, key: str, training: bool, **place: Any) -> DataLoader[Any]:
    """Distribute the samples, or whole batches, of a data set that has an order of its own."""
    from runnerkit.sampling.indexed.lane_order import LaneBatches, LaneBatchSampler  # late, as few runs need it

    batches: Any = loader.batch_sampler
    sampler = loader.sampler if batches is None else SamplerMembers(batches).sampler
    if type(sampler) is not SequentialSampler or not (batches is None or _batches_alike(loader)):
        raise TypeError(
            f"loader {key!r}: {type(loader.dataset).__name__} has its own order; a {_sampler_name(loader)} would open "
            "a file for each sample: omit it (and shuffle=True), and pass shuffle=1000 to the data set"
        )
    place |= {"key": key, "num_workers": loader.num_workers}
    share: LaneBatchSampler | LaneBatches
    if batches is None:
        share = LaneBatches(loader.dataset, is_batch_sampler=False, training=training, **place)
    else:
        place |= {"batch_size": batches.batch_size, "drop_last": batches.drop_last, "training": training}
        share = LaneBatchSampler(loader.dataset, **place)
    return _with_order(loader, share)


def _with_order(loader: DataLoader[Any], share: ShardedBatchSampler | ShardedBatches) -> DataLoader[Any]:
    """Return a copy of `loader` that fetches the samples, or batches, of `share`."""
    name = "sampler" if loader.batch_sampler is None else "batch_sampler"
    own = copy.copy(loader)
    vars(own)[name] = share
    if not is_seeded(loader.dataset, loader.collate_fn):
        return with_feed(own, share)  # without places, which cost a tuple per sample
    dataset = SeededDataset(loader.dataset, training=share.training, seed=share.seed, collate_fn=loader.collate_fn)
    return with_feed(own, share, dataset=dataset, **{name: Places(share)})


def batches_of(loader: Any) -> Iterator[Any]:
    """Iterate over a loader from :func:`shard_loader`, or any other iterable."""
    feed, share = feed_of(loader), share_of(loader)
    if isinstance(feed, DataLoader) and share.needs_new_workers:
        feed._iterator, share.needs_new_workers = None, False
    if isinstance(feed, DataLoader) and feed._iterator is not None and feed.generator is None:
        # Other workers draw a seed in each epoch, persistent ones only in the first. Draw it here, so that dropout is
        # the same with both, and in a resumed run, which restarts the workers.
        torch.empty((), dtype=torch.int64).random_()
    is_stream = isinstance(feed, DataLoader) and isinstance(feed.dataset, IterableDataset)
    is_unpacked = is_stream and unpacks_within(feed, share.unpacked)
    batches: Iterator[Any] = without_records(started(feed))
    if isinstance(loader, OuterLoader):
        return batches  # the wrapped loader's, which came through here
    batches = batches if is_unpacked else share.unpacked(batches)
    return watch_workers(batches) if isinstance(feed, DataLoader) and feed.num_workers > 0 else batches


def share_of(loader: Any) -> LoaderShare:
    """Return the share of this process in a loader from :func:`shard_loader`, or in any other iterable."""
    for name in ("_share", "batch_sampler"):
        found = getattr(loader, name, None)
        if isinstance(found, LoaderShare):
            return found
        members = SamplerMembers(found)
        if members.position_after is not None:
            return AdaptedShare(found)
        if members.recorded_share is not None:
            return share_of(found)
    return _WHOLE


def start_epoch(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` once on each part of a loader; see :func:`runnerkit.sampling.epochs.set_epoch`."""
    share = share_of(loader)
    if share.continues:  # the pass, in the next epoch
        share.set_epoch(epoch)
    else:
        set_epoch(epoch, loader, share)


def count_batches(loader: Any) -> int | None:
    """Return the length of `loader`, or None if it has none (a DataLoader over a stream only seems to have one)."""
    try:
        return length_of(feed_of(loader))
    except TypeError:
        return None


def gives_new_batches(loader: Any) -> bool:
    """Return whether each batch of a loader surely has memory of its own: with workers, or if torch collates it."""
    while isinstance(loader, OuterLoader):
        loader = loader.origin
    return isinstance(loader, DataLoader) and (loader.num_workers > 0 or loader.collate_fn is default_collate)


def is_length_sure(loader: Any) -> bool:
    """Return whether a loader with a length yields exactly that many: a stream or the user's sampler may not."""
    while isinstance(loader, OuterLoader):
        if share_of(loader).continues:
            return True  # with epoch_steps
        loader = loader.origin
    if isinstance(loader, DataLoader):
        samplers = [each for each in samplers_of(loader) if each is not None]
        return not isinstance(loader.dataset, IterableDataset) and all(map(tells_its_length, samplers))
    return isinstance(loader, list | tuple) or share_of(loader).yields_its_length
