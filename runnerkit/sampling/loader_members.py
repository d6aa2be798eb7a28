"""Members of loaders, samplers and data sets that some classes lack, the user's included."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from runnerkit.support.members import Member, Members


class LoaderMembers(Members):
    """Members of loaders.

    Attributes:
        pipeline: the stages of a loader of WebDataset.
        shard: returns a process's share of a loader that is not a DataLoader.
        for_device: returns a loader for a process that computes on a device.
    """

    batch_size = Member[int | None](None)
    num_workers = Member(0)
    prefetch_factor = Member[int | None](None)
    drop_last = Member[bool | None](None)
    in_order = Member(True)
    dataset = Member[Any](None)
    sampler = Member[Any](None)
    batch_sampler = Member[Any](None)
    pipeline = Member[Any](None)
    shard = Member[Callable[..., Any] | None](None)
    for_device = Member[Callable[..., Any] | None](None)


class SamplerMembers(Members):
    """Members of samplers and batch samplers.

    Attributes:
        sampler: the sampler inside a batch sampler or a wrapper.
        data_source, dataset: the data set that it was made for, in torch's samplers and in DistributedSampler.
        num_labels: length of the data set that it was made for, in samplers of runnerkit.
        replacement, shuffle: options that its order depends on.
        order_options: these, in a data set of files.
        stride: samples, or whole batches, of all processes in a step, in shares of 0.1.
        position_after: tells a position in the data, in shares.
        recorded_share: the share whose batches it records.
    """

    sampler = Member[Any](None)
    generator = Member[Any](None)
    data_source = Member[Any](None)
    dataset = Member[Any](None)
    num_labels = Member[int | None](None)
    replacement = Member[Any](False)
    shuffle = Member[Any](False)
    order_options = Member[Mapping[str, Any] | None](None)
    batch_size = Member[int | None](None)
    drop_last = Member[bool | None](None)
    stride = Member(1)
    position_after = Member[Callable[..., Any] | None](None)
    recorded_share = Member[Any](None, name="_share")


class DatasetMembers(Members):
    """Members of data sets and of shards of a stream; docs/streams.md describes those of streams.

    Attributes:
        getitems: fetches a batch.
        lane_order: returns an order of its own, by files.
        check_share: raises unless a sampler and a step size suit it.
        keeps_order: whether it yields samples in its own order.
        num_shards, shard: number of shards of a stream, and a function that returns one.
        lanes: (processes, workers) that can divide the shards exactly.
        splits_itself: whether it gives each process its share.
        state_dict, load_state_dict: position of a stream to continue from.
        pipeline: the stages of a data set of WebDataset.
    """

    set_epoch = Member[Callable[[int], Any] | None](None)
    getitems = Member[Callable[..., Any] | None](None, name="__getitems__")
    lane_order = Member[Callable[..., Any] | None](None)
    check_share = Member[Callable[..., Any] | None](None)
    keeps_order = Member[Any](True)
    num_shards = Member[int | None](None)
    shard = Member[Callable[..., Any] | None](None)
    lanes = Member[tuple[int, int] | None](None)
    splits_itself = Member[Any](False)
    state_dict = Member[Callable[..., Any] | None](None)
    load_state_dict = Member[Callable[..., Any] | None](None)
    pipeline = Member[Any](None)
