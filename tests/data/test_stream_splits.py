"""No stream is split twice, and none loses samples silently."""

import logging
import time
import tracemalloc

import numpy as np
import pytest
from torch.utils.data import DataLoader, IterableDataset

from runnerkit.data import BatchLimitLoaderWrapper
from runnerkit.sampling.sharding import batches_of, share_of
from runnerkit.sampling.streams import lane_readers
from tests.data.places import flat, share, shares
from tests.data.stream_sources import FIRST, NUM_SAMPLES, SIZES, augmented, hugging_face, noted, web_loader, webdataset

pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:WebDataset"),
]


def numbers(shards):
    return sorted(sample["n"] for shard in shards for sample in flat(batches_of(shard)))


def half_of(folder):
    from datasets.distributed import split_dataset_by_node

    return DataLoader(split_dataset_by_node(hugging_face(folder, augmented), rank=1, world_size=2), 4)


REFUSED = {
    # Split again, it would train on 48 of its 96 samples, as in version 0.1.0.
    "split by node": (half_of, ValueError, "the data set was split for 2 processes by split_dataset_by_node"),
    # They would run on the batches of one process.
    "own stages": (
        lambda folder: web_loader(webdataset(folder, augmented), batch_size=4).unbatched().shuffle(10).batched(4),
        TypeError,
        "is a WebLoader and cannot be shared among 2 processes",
    ),
    # Its with_epoch would be ignored.
    "own length": (
        lambda folder: web_loader(webdataset(folder, augmented), batch_size=4).with_epoch(5),
        ValueError,
        "its WebLoader repeats or ends by itself .* pass epoch_steps= to",
    ),
    # Each archive passes through the pipeline by itself.
    "drops samples of each shard": (
        lambda folder: DataLoader(webdataset(folder, augmented).batched(4, partial=False), None),
        ValueError,
        r"a pipeline with .batched\(partial=False\) would lose the last",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_lose_samples_is_refused(folder, name):
    """The error names the loader."""
    make, error, message = REFUSED[name]
    for training in (True, False) if name == "own length" else (True,):
        with pytest.raises(error, match=f"'train'.*{message}"):
            shares(make(folder), 2, training=training)


@pytest.mark.parametrize("options", [{}, {"shardshuffle": False}, {"nodesplitter": None}], ids=str)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shuffled_pipeline_trains_on_each_sample_once(folder, options, num_workers):
    """In version 0.1.0 the shuffle drew differently in each process: 71 different samples, 25 of them twice."""
    pipeline = webdataset(folder, augmented, **options)

    shards = shares(DataLoader(pipeline, 4, num_workers=num_workers, collate_fn=list), 2)

    assert numbers(shards) == list(range(NUM_SAMPLES))


def test_a_pipeline_that_splits_by_node_is_split_once(folder, tmp_path):
    """Its splitter is left out, since lanes split."""
    import webdataset as wds

    pipeline = webdataset(folder, lambda sample: noted(sample, tmp_path / "log"), nodesplitter=wds.split_by_node)

    assert numbers(shares(DataLoader(pipeline, 4, collate_fn=list), 2, training=False)) == list(range(NUM_SAMPLES))
    assert len((tmp_path / "log").read_text().split()) == NUM_SAMPLES


def test_a_shuffle_without_a_seed_is_refused_by_several_processes(folder, caplog):
    """Each would read an order of its own; in one process, a resumed run would."""
    loader = DataLoader(hugging_face(folder, augmented).shuffle(buffer_size=3), 4, collate_fn=list)

    with caplog.at_level(logging.WARNING):
        shares(loader, 1)

    assert "'train': its shuffle() lacks a seed, so its order differs in a resumed run, which would miss" in caplog.text
    with pytest.raises(ValueError, match=r"its shuffle\(\) lacks a seed, so its order differs in each process"):
        shares(loader, 2)


def test_a_resampled_pipeline_needs_epoch_steps(folder):
    """It draws archives in an order of its own in each process."""
    pipeline = webdataset(folder, augmented, resampled=True, shardshuffle=False)
    loader = DataLoader(pipeline, 4, collate_fn=list)

    with pytest.raises(TypeError, match=r"'train': its WebDataset pipeline repeats its shards .* pass epoch_steps= to"):
        shares(loader, 2)
    assert len(set(numbers(shares(loader, 2, steps=12, epoch=None)))) > 60  # lanes of unequal length repeat some sooner


def test_a_pipeline_with_an_unknown_splitter_is_not_divided(folder, caplog):
    """Whatever it selects from the list of archives, it would select from one archive."""
    pipeline = webdataset(folder, augmented, nodesplitter=every_second, shardshuffle=False)

    with caplog.at_level(logging.WARNING):
        shards = shares(DataLoader(pipeline, 4, collate_fn=list), 1)

    expected = [number for index in range(1, len(SIZES), 2) for number in range(FIRST[index], FIRST[index + 1])]
    assert numbers(shards) == expected


def every_second(urls):
    return (url for number, url in enumerate(urls) if number % 2)


WHOLE = {
    "take": lambda stream: stream.take(20),
    "skip": lambda stream: stream.skip(20),
    "repeat": lambda stream: stream.repeat(2),
    "with_indices": lambda stream: stream.filter(lambda sample, index: index % 10 != 0, with_indices=True),
    "drop_last_batch": lambda stream: stream.batch(4, drop_last_batch=True),
}


@pytest.mark.parametrize("name", WHOLE)
def test_what_acts_on_the_whole_stream_is_not_done_per_shard(folder, caplog, name):
    """take(20) of each shard would be other samples than take(20) of the stream."""
    stream = WHOLE[name](hugging_face(folder, augmented))
    expected = list(stream)
    stream.lanes = (2, 2)

    with caplog.at_level(logging.WARNING):
        shards = shares(DataLoader(stream, 4, collate_fn=list), 2, training=False)

    assert f"its {name} acts on the whole stream, so it cannot be divided" in caplog.text
    if name in ("with_indices", "repeat"):  # start_epoch shuffles the shards, and so what the others choose
        assert sum(len(batch) for shard in shards for batch in batches_of(shard)) == len(expected)


@pytest.mark.parametrize("change", [lambda pipeline: pipeline.slice(20), lambda pipeline: pipeline.with_epoch(20)])
def test_a_part_of_a_pipeline_is_not_cut_per_archive(folder, change):
    """An evaluation of 20 samples has 20 samples."""
    pipeline = change(webdataset(folder, augmented))
    pipeline.lanes = (2, 2)

    assert len(numbers(shares(DataLoader(pipeline, 4, collate_fn=list), 1, training=False))) == 20


@pytest.mark.parametrize("lanes", [4, (2.0, 2), "ab", (2, 0), (1, 2, 3)], ids=str)
def test_wrong_lanes_are_named(folder, lanes):
    """Whatever their type."""
    stream = hugging_face(folder, augmented)
    stream.lanes = lanes

    with pytest.raises(ValueError, match=r"lanes must be \(processes, workers\), two numbers >= 1, got"):
        shares(DataLoader(stream, 4), 1, training=False)


def test_lanes_may_be_numbers_of_numpy(folder):
    """In a list or a tuple."""
    orders = []
    for lanes in ((2, 2), [np.int64(2), np.int64(2)]):
        stream = hugging_face(folder, augmented)
        stream.lanes = lanes
        orders.append(numbers(shares(DataLoader(stream, 4, collate_fn=list), 1, training=False)))

    assert orders[0] == orders[1]


class SplitsItself(IterableDataset):
    splits_itself = True

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        return iter(range(self.rank, 8, 2))


def test_a_stream_that_declares_it_splits_itself_is_left_alone(caplog):
    """MosaicML's StreamingDataset is recognized by its class."""
    attributes = {"__module__": "streaming.base.dataset", "splits_itself": False}
    streaming = DataLoader(type("StreamingDataset", (SplitsItself,), attributes)(0), 2)
    own = DataLoader(SplitsItself(1), 2)

    assert share(own, 1, 2, epoch=None) is own
    share(own, 0, 2, steps=2, epoch=None)
    assert "loader 'train' does not have a position: a resumed run would read its data from the start" in caplog.text
    assert share(streaming, 1, 2, epoch=None) is streaming


def test_wrappers_pass_on_that_a_stream_may_be_endless(folder, caplog):
    """A limited or prefetched stream has lanes too."""
    loader = BatchLimitLoaderWrapper(DataLoader(hugging_face(folder, augmented), 4), 100)

    with caplog.at_level(logging.WARNING):
        share(loader, 0, 2, steps=5, epoch=None)

    assert not caplog.records


def test_parquet_shards_are_closed_without_a_long_wait(tmp_path):
    """The library of the data set would wait 5 s at the end of each of the four shards."""
    datasets = pytest.importorskip("datasets")
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    paths = [str(tmp_path / f"{number}.parquet") for number in range(4)]
    for number, path in enumerate(paths):
        parquet.write_table(pa.table({"n": [number]}), path)
    options = {"data_files": paths, "split": "train", "streaming": True, "cache_dir": str(tmp_path / "cache")}
    stream = datasets.load_dataset("parquet", **options).shuffle(seed=0, buffer_size=2)
    loader = share(DataLoader(stream, 2, collate_fn=list), steps=4, epoch=None)
    began = time.perf_counter()

    assert numbers([loader]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert time.perf_counter() - began < 15


class ManyShards(IterableDataset):
    """A hundred thousand shards for each of the processes."""

    draws_nothing = True

    def __init__(self, world_size, lanes):
        self.num_shards, self.lanes = 100_000 * world_size, lanes

    def shard(self, num_shards, index):
        return iter([index] * 4)

    def __iter__(self):
        raise AssertionError("it would be read whole")


@pytest.mark.parametrize("world_size", [1, 4096])
def test_a_rank_of_thousands_needs_no_more_memory(world_size):
    """With 100,000 shards a rank; without cost in the number of ranks' shards."""
    loader = DataLoader(ManyShards(world_size, (world_size, 4)), 32, collate_fn=list)
    tracemalloc.start()
    shard = share(loader, world_size - 1, world_size, steps=8)

    batches = list(batches_of(shard))

    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [len(batch) for batch in batches] == [32] * 8
    assert peak < 8e6
    assert share_of(shard).position["within"]["lanes"] == [world_size, 4]


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_hugging_face_shard_continues_at_its_state(folder, monkeypatch, is_shuffled):
    """Its state does not hold a shuffle buffer, so with one the shard is read again."""
    monkeypatch.setattr(lane_readers, "_SAMPLES_PER_STATE", 3)

    def reading(read):
        stream = hugging_face(folder, lambda sample: read.append(sample["n"]) or sample, is_shuffled=is_shuffled)
        stream.lanes = (2, 1)
        return share(DataLoader(stream, 2, collate_fn=list))

    whole = list(batches_of(reading([])))
    first, read = reading([]), []
    batches = batches_of(first)
    for _ in range(30):
        next(batches)
    second = reading(read)
    share_of(second).skip(share_of(first).position_after(30))

    assert list(batches_of(second)) == whole[30:]
    assert len(read) - sum(map(len, whole[30:])) <= (99 if is_shuffled else 2 * 3)
