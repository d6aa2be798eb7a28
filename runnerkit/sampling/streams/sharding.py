"""The share of a process of a stream: its lanes if the stream can be divided, otherwise its samples."""

from __future__ import annotations

import copy
import logging
from typing import Any

from torch.utils.data import DataLoader

from runnerkit.sampling.feed import with_feed
from runnerkit.sampling.lanes import can_divide, check_step, checked_lanes, default_lanes, even_lanes
from runnerkit.sampling.orders import PREDICT
from runnerkit.sampling.streams.lane_stream import LaneStream
from runnerkit.sampling.streams.sharded_stream import ShardedStream
from runnerkit.sampling.streams.shards import (
    Shards,
    WholePipeline,
    is_endless_webdataset,
    is_webdataset,
    shards_of,
    shuffles_unseeded,
    splits_itself,
    whole_operations,
)

logger = logging.getLogger(__name__)

_INSTEAD = "pass epoch_steps= to train() instead"


def share_stream(
    loader: DataLoader[Any], *, key: str, training: bool, endless: bool, rank: int, world_size: int,
    seed: int,
) -> DataLoader[Any]:  # fmt: skip
    """Distribute the lanes of a stream of shards, or the samples of any other stream.

    Args:
        loader: has an IterableDataset; the other arguments are those of
            :func:`runnerkit.sampling.sharding.shard_loader`, with the loader's own seed.
    Raises:
        ValueError: the stream has been split by rank, or its lanes do not fit.
        TypeError: with several processes, a pipeline that never ends.
    """
    if splits_itself(loader.dataset):
        return loader
    if shuffles_unseeded(loader.dataset):
        _check_seeded(key, world_size=world_size)
    try:
        shards = shards_of(loader.dataset)
    except ValueError as error:
        raise ValueError(f"loader {key!r}: {error}") from error
    place: dict[str, Any] = {
        "training": training, "key": key, "collate_fn": loader.collate_fn, "batch_size": loader.batch_size,
        "rank": rank, "world_size": world_size, "seed": seed, "num_workers": loader.num_workers,
    }  # fmt: skip
    warns = training and rank == 0
    lanes, why_none = _lanes_of(shards, loader, key=key, warns=warns, endless=endless, world_size=world_size)
    if shards is not None and lanes is not None:
        place |= {"endless": endless, "are_default": shards.lanes is None}
        of_lanes = LaneStream(shards, lanes=lanes[0], turns=lanes[1], **place)
        replaced = {"dataset": of_lanes, "collate_fn": of_lanes.collate}
        return with_feed(copy.copy(loader), of_lanes, batch_sampler=None, batch_size=None, **replaced)
    num_readers = world_size * max(1, loader.num_workers)
    if num_readers > 1 and rank == 0:
        logger.warning(
            "loader %r: each of %d readers (%d processes x %d workers) reads the whole stream; %s",
            key, num_readers, world_size, loader.num_workers, why_none,
        )  # fmt: skip
    dataset: Any = loader.dataset
    if is_endless_webdataset(dataset):
        if world_size > 1:
            raise TypeError(
                f"loader {key!r}: its WebDataset pipeline repeats its shards in an order of its own in each process "
                f"(resampled=True, .repeat(), .with_epoch()); {why_none if endless else _INSTEAD}"
            )
    elif shards is not None and is_webdataset(dataset):
        dataset = WholePipeline(dataset, seed=seed)
    stream = ShardedStream(dataset, drop_last=loader.drop_last, **place)
    replaced = {"dataset": stream, "collate_fn": stream.collate if stream.knows_tail else loader.collate_fn}
    return with_feed(copy.copy(loader), stream, batch_sampler=None, batch_size=None, **replaced)


def _lanes_of(
    shards: Shards | None, loader: DataLoader[Any], *, key: str, warns: bool, endless: bool, world_size: int
) -> tuple[tuple[int, int] | None, str]:
    """Return the lanes of a stream; None, with advice, if it cannot be divided."""
    if whole := whole_operations(loader.dataset):
        return None, f"its {whole[0]} acts on the whole stream, so it cannot be divided (docs/streams.md)"
    if not endless and is_endless_webdataset(loader.dataset):
        return None, "leave out with_epoch and repeat to read each sample once (docs/streams.md)"
    if shards is None or shards.num_shards < 2:
        return None, "if its data are in files, use ShardedFiles, which reads each sample once (docs/streams.md)"
    given = checked_lanes(shards.lanes)
    if given is None and key == PREDICT:
        return None, "a prediction keeps its order, unless it has lanes = (processes, workers) (docs/streams.md)"
    if given == (1, 1):
        return None, "lanes = (1, 1) keeps its order; leave that out to read each sample once (docs/streams.md)"
    if not endless and loader.drop_last:
        return None, "leave out drop_last to read each sample once (docs/streams.md)"
    job: dict[str, Any] = {
        "stride": None if loader.batch_size is None else loader.batch_size * world_size,
        "world_size": world_size, "num_workers": loader.num_workers,
    }  # fmt: skip
    if given is None:
        return _default_lanes_of(shards.num_shards, endless=endless, key=key if warns else None, **job)
    lanes, turns = given
    if lanes * turns > shards.num_shards:
        raise ValueError(
            f"loader {key!r}: lanes=({lanes}, {turns}) need {lanes * turns} shards, and its stream has "
            f"{shards.num_shards}; choose fewer lanes"
        )
    if job["stride"] is not None:
        check_step(job["stride"], lanes, turns, key=key)
    if not can_divide(lanes, turns, **job):
        return None, (
            f"they cannot divide its {lanes} x {turns} lanes: set lanes = (a multiple of the processes, a multiple of "
            "the workers) on the data set"
        )
    return given, ""


def _default_lanes_of(
    num_shards: int, *, endless: bool, key: str | None, stride: int | None, world_size: int, num_workers: int
) -> tuple[tuple[int, int] | None, str]:
    """Return lanes that do not depend on the job if it divides these, otherwise one for each reader.

    Args:
        key: of the loader, to warn that the batches depend on the job; None to say nothing.
    """
    job: dict[str, Any] = {"stride": stride, "world_size": world_size, "num_workers": num_workers}
    lanes, turns = default_lanes(num_shards, stride) if endless else even_lanes(num_shards, stride)
    if can_divide(lanes, turns, **job):
        return (lanes, turns), ""
    own = world_size, max(1, num_workers)
    if own[0] * own[1] > num_shards:
        return None, f"it has {num_shards} shards: use fewer workers, or more shards, to read each sample once"
    if key is not None:
        logger.warning(
            "loader %r: %d processes x %d workers do not divide the default of %d x %d lanes, so its batches depend "
            "on the number of processes and workers; to keep the same batches, set lanes = (a multiple of the "
            "processes, a multiple of the workers) on the data set",
            key, world_size, num_workers, lanes, turns,
        )  # fmt: skip
    return own, ""


def _check_seeded(key: str, *, world_size: int) -> None:
    what = f"loader {key!r}: its shuffle() lacks a seed, so its order differs in"
    if world_size > 1:
        raise ValueError(f"{what} each process and in a resumed run; pass shuffle(seed=...)")
    logger.warning("%s a resumed run, which would miss and repeat samples; pass shuffle(seed=...)", what)


def loader_in(loader: Any, *, key: str) -> Any:
    """Return the DataLoader in a WebLoader without stages of its own; any other loader unchanged.

    Raises:
        ValueError: the WebLoader has a length of its own.
    """
    if not (is_webdataset(loader) and len(loader.pipeline) == 1 and isinstance(loader.pipeline[0], DataLoader)):
        return loader
    if loader.repetitions != 1 or loader.nsamples > 0:
        raise ValueError(
            f"loader {key!r}: its WebLoader repeats or ends by itself (with_epoch, repeat); leave that out and pass "
            "epoch_steps= to train(), or wrap the loader in a BatchLimitLoaderWrapper"
        )
    return loader.pipeline[0]
