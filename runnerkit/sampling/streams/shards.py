"""Streams that consist of shards: data sets of Hugging Face and WebDataset, and any with the two members below.

A stream has shards if it has ``num_shards`` and ``shard(num_shards=..., index=...)``, which returns an iterable of one
of them. This is the interface of ``datasets.IterableDataset``.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Any, Protocol

import numpy as np
from torch.utils.data import IterableDataset

from runnerkit.sampling.epochs import set_epoch
from runnerkit.sampling.loader_members import DatasetMembers
from runnerkit.sampling.seeded_dataset import draws_nothing
from runnerkit.seeding.generators import derive_seed
from runnerkit.support.members import Member, Members

_SHARD_STAGES = ("single_node_only", "split_by_node", "split_by_worker", "non_empty", "_shuffle", "detshuffle")
_WAIT_S = 0.1
_LARGEST_SEED_BITS = 64  # without a seed, NumPy draws 128 bits
_WHOLE_STAGES = ("_slice", "slice", "islice")
# Of datasets: classes in the chain of a data set, and what makes them.
_WHOLE_OPERATIONS = {
    "TakeExamplesIterable": "take",
    "SkipExamplesIterable": "skip",
    "RepeatExamplesIterable": "repeat",
    "CyclingMultiSourcesExamplesIterable": "interleave_datasets",
    "RandomlyCyclingMultiSourcesExamplesIterable": "interleave_datasets",
}
_OPENERS = ("StreamingOpen", "FileCache", "tarfile_samples")


class _HuggingFaceMembers(Members):
    """Members of Hugging Face's data sets: the last link of the chain of operations, and how it was split."""

    last_link = Member[Any](None, name="_ex_iterable")
    split = Member[Any](None, name="_distributed")


class _SplitMembers(Members):
    world_size = Member[int | None](None)


class _LinkMembers(Members):
    """Members of a link of such a chain: the links before it, and arguments of the operation."""

    ex_iterable = Member[Any](None)
    ex_iterables = Member[Iterable[Any]](())
    with_indices = Member[Any](False)
    drop_last_batch = Member[Any](False)
    buffer_size = Member[Any](None)
    generator = Member[Any](None)


class _StageMembers(Members):
    """Members of a stage of a WebDataset pipeline: the function that it curries, and those of a list of shards."""

    function = Member[Any](None, name="f")
    name = Member[str | None](None, name="__name__")
    urls = Member[Any](None)
    worker_seed = Member[Any](None)


class Shards(Protocol):
    """The shards of a stream.

    Attributes:
        num_shards: their number.
        lanes: (processes, workers) that can divide them exactly, if the user chose it; (1, 1) keeps the stream's order.
        draws_nothing: whether reading draws no random numbers, if the user declared it.
    """

    num_shards: int
    lanes: tuple[int, int] | None
    draws_nothing: bool

    def open(self, index: int, *, epoch: int, seed: int) -> Iterable[Any]:
        """Return the samples of a shard, the same ones in the same order for the same arguments."""
        ...


def shards_of(dataset: Any) -> Shards | None:
    """Return the shards of a stream; None if it cannot be divided.

    Raises:
        ValueError: it has been split by rank, or would lose samples.
    """
    _check_not_split(dataset)
    if is_webdataset(dataset):
        return _WebDatasetShards(dataset) if _WebDatasetShards.can_divide(dataset) else None
    if whole_operations(dataset):
        return None
    members = DatasetMembers(dataset)
    return _DatasetShards(dataset) if members.num_shards is not None and callable(members.shard) else None


def whole_operations(dataset: Any) -> list[str]:
    """Return the operations of a Hugging Face data set that would act on each shard, but mean the whole stream."""
    found: list[str] = []
    for part in _parts(dataset):
        name, members = type(part).__name__, _LinkMembers(part)
        if name in _WHOLE_OPERATIONS:
            found.append(_WHOLE_OPERATIONS[name])
        found += ["with_indices"] if members.with_indices else []
        found += ["drop_last_batch"] if members.drop_last_batch else []
    return found


def shuffles_unseeded(dataset: Any) -> bool:
    """Return whether a Hugging Face data set shuffles in an order that no other process and no resumed run has."""
    generators = (_LinkMembers(part).generator for part in _parts(dataset))
    seeds = (each.bit_generator.seed_seq for each in generators if isinstance(each, np.random.Generator))
    entropies = (each.entropy for each in seeds if isinstance(each, np.random.SeedSequence))
    return any(isinstance(each, int) and each.bit_length() > _LARGEST_SEED_BITS for each in entropies)


def _parts(dataset: Any) -> list[Any]:
    """Return the links of a Hugging Face data set's chain of operations; an empty list for any other data set."""
    is_theirs = type(dataset).__module__.startswith("datasets.")
    parts = [_HuggingFaceMembers(dataset).last_link] if is_theirs else []
    for part in parts:  # grows in the loop
        members = _LinkMembers(part)
        parts += [each for each in (members.ex_iterable, *members.ex_iterables) if each]
    return parts


def can_seek(shard: Any) -> bool:
    """Return whether a shard has a state to continue from; a shuffle buffer of Hugging Face's is lost in it."""
    members = DatasetMembers(shard)
    has_state = callable(members.state_dict) and callable(members.load_state_dict)
    return has_state and all(_LinkMembers(part).buffer_size is None for part in _parts(shard))


def is_webdataset(dataset: Any) -> bool:
    """Return whether `dataset` is a pipeline of WebDataset, which its loaders are as well."""
    is_theirs = any(each.__module__.startswith("webdataset.") for each in type(dataset).__mro__)
    return is_theirs and DatasetMembers(dataset).pipeline is not None


def splits_itself(dataset: Any) -> bool:
    """Return whether a stream gives each process its share: MosaicML's, or one that declares ``splits_itself = True``.

    Such a stream is used unchanged.
    """
    return DatasetMembers(dataset).splits_itself is True or any(
        each.__name__ == "StreamingDataset" and each.__module__.startswith("streaming.")
        for each in type(dataset).__mro__
    )


def _check_not_split(dataset: Any) -> None:
    split = _HuggingFaceMembers(dataset).split  # of datasets.distributed.split_dataset_by_node
    num_parts = _SplitMembers(split).world_size or 1
    if num_parts > 1:
        raise ValueError(
            f"the data set was split for {num_parts} processes by split_dataset_by_node, and would be split "
            "again; pass the whole data set, which the runner splits"
        )


class _DatasetShards:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.num_shards = int(dataset.num_shards)
        self.lanes = DatasetMembers(dataset).lanes
        self.draws_nothing = draws_nothing(dataset)

    def open(self, index: int, *, epoch: int, seed: int) -> Iterable[Any]:
        _shorten_waits()
        shard: Iterable[Any] = self.dataset.shard(num_shards=self.num_shards, index=index)
        set_epoch(epoch, shard)
        return shard


def _shorten_waits() -> None:
    """Let Hugging Face's data sets wait a tenth of a second when they close shuffled parquet files, instead of 5 s.

    The wait is to prevent a crash of Arrow's threads when Python exits (https://github.com/apache/arrow/issues/45214).
    """
    config = sys.modules.get("datasets.config")
    waits_s = getattr(config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)
    if waits_s > _WAIT_S:
        vars(config)["SLEEP_TIME_ON_THREADS_SHUTDOWN"] = _WAIT_S


class _WebDatasetShards:
    """The shards of a pipeline; each passes through all stages separately.

    Stages that split or shuffle the shards are left out. A buffer of ``.shuffle(n)`` is seeded by epoch and shard.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.urls, (_, self.stages) = dataset.pipeline[0].urls, _split(dataset)
        self.num_shards = len(self.urls)
        self.lanes = DatasetMembers(dataset).lanes
        self.draws_nothing = draws_nothing(dataset)
        if any(_name(stage) == "_batched" and stage.kw.get("partial") is False for stage in self.stages):
            raise ValueError(
                "a pipeline with .batched(partial=False) would lose the last samples of each shard; leave out partial, "
                "or pass batch_size to the DataLoader instead"
            )

    @staticmethod
    def can_divide(dataset: Any) -> bool:
        """Return whether it begins with a list of URLs, and no unknown stage comes before the one that opens them."""
        stages = dataset.pipeline
        if len(stages) < 2 or _StageMembers(stages[0]).urls is None:
            return False
        _, rest = _split(dataset)
        return bool(rest) and _name(rest[0]) in _OPENERS and not any(_name(stage) in _WHOLE_STAGES for stage in rest)

    def open(self, index: int, *, epoch: int, seed: int) -> Iterable[Any]:
        stages = [
            _seeded(stage, epoch=epoch, seed=derive_seed(seed, "webdataset", epoch, index, number))
            for number, stage in enumerate(self.stages)
        ]
        pipeline = copy.copy(self.dataset)
        pipeline.repetitions, pipeline.nsamples = 1, -1
        pipeline.pipeline = [[{"url": self.urls[index]}], *stages]
        return pipeline  # type: ignore[no-any-return]


def _split(dataset: Any) -> tuple[list[Any], list[Any]]:
    """Return a pipeline's stages after the first one: stages that act on shards, and stages that act on samples."""
    stages = dataset.pipeline[1:]
    of_shards = list(takewhile(lambda stage: _name(stage) in _SHARD_STAGES, stages))
    of_samples = stages[len(of_shards) :]
    return of_shards, [stage for stage in of_samples if _name(stage) != "check_empty"]  # a shard may be


def _name(stage: Any) -> str:
    curried = _StageMembers(stage).function
    stage = stage if curried is None else curried
    return _StageMembers(stage).name or type(stage).__name__


def _seeded(stage: Any, *, epoch: int, seed: int) -> Any:
    """Return a copy of a stage that shuffles alike in every process; any other stage unchanged."""
    stage = copy.copy(stage)
    if _name(stage) == "_shuffle" and stage.kw.get("seed") is None:
        stage.kw = {**stage.kw, "rng": random.Random(seed)}
    elif _name(stage) == "detshuffle":
        stage.epoch = epoch - 1  # it counts before it shuffles
    return stage


class WholePipeline(IterableDataset[Any]):
    """All shards of a WebDataset pipeline, one after another: the same samples in the same order in every process.

    Args:
        dataset: the pipeline.
        seed: determines what the pipeline shuffles, together with the epoch.
    """

    def __init__(self, dataset: Any, *, seed: int) -> None:
        self.shards, self.seed = _WebDatasetShards(dataset), seed
        of_shards, _ = _split(dataset)
        self._is_shuffled = any(_name(stage) in ("_shuffle", "detshuffle") for stage in of_shards)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Shuffle in another order."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        order = list(range(self.shards.num_shards))
        if self._is_shuffled:
            random.Random(derive_seed(self.seed, "webdataset", self._epoch)).shuffle(order)
        for index in order:
            yield from self.shards.open(index, epoch=self._epoch, seed=self.seed)


def is_endless_webdataset(dataset: Any) -> bool:
    """Return whether a WebDataset pipeline repeats its shards (``resampled=True``, ``repeat()``, ``with_epoch(n)``)."""
    if not is_webdataset(dataset):
        return False
    return _StageMembers(dataset.pipeline[0]).worker_seed is not None or dataset.repetitions != 1
