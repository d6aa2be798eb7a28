"""The job reads each sample of a stream once, in one order for any number of processes and workers.

RUNNERKIT_WRITE_STREAM_TABLE=1 writes the table of docs/streams.md.
"""

import os
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from benchmarks.results import write_section
from runnerkit.sampling.sharding import batches_of, start_epoch
from tests.data.places import flat, joined, share
from tests.data.stream_sources import NUM_SAMPLES, SOURCES, augmented, noted

PAGE = Path(__file__).parents[2] / "docs" / "streams.md"
STEP = 8
JOBS = list(product((1, 2, 4), (0, 1, 2)))
GENERIC = "any other IterableDataset"

pytestmark = [
    pytest.mark.filterwarnings("ignore:set WebDataset", "ignore:This DataLoader will create"),
    # WebDataset leaves archives to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.set_vital. is deprecated"),
]


def job(source, folder, change, *, world_size, num_workers, training):
    """Return the samples of each rank's batches: 2 epochs of 7 steps of training, or an evaluation."""
    dataset_of, loader_of = SOURCES[source]
    ranks = []
    for rank in range(world_size):
        options = {"batch_size": STEP // world_size, "num_workers": num_workers, "collate_fn": list}
        kind = {"steps": 7} if training else {"key": "valid", "training": False}
        own, batches = share(loader_of(dataset_of(folder, change), **options), rank, world_size, epoch=None, **kind), []
        for epoch in (1, 2) if training else (1,):
            start_epoch(own, epoch)
            batches += batches_of(own)
        ranks.append(batches)
    return ranks


def row(source, folder, tmp_path, *, world_size, num_workers):
    """Return reads, missed and repeated samples of an evaluation, and the global batches of a training."""
    options = {"world_size": world_size, "num_workers": num_workers}
    log = tmp_path / f"log {world_size} {num_workers}"
    log.write_text("")
    samples = flat(flat(job(source, folder, partial(noted, log=log), training=False, **options)))
    seen = Counter(sample["n"] for sample in samples)
    reads = len(log.read_text().split()) / NUM_SAMPLES
    trained = joined(job(source, folder, augmented, training=True, **options))
    return (reads, NUM_SAMPLES - len(seen), seen.total() - len(seen)), trained


SLOW = ("Hugging Face in a StatefulDataLoader", "WebDataset in its WebLoader")


@pytest.mark.parametrize(
    "source", [pytest.param(each, marks=pytest.mark.slow) if each in SLOW else each for each in SOURCES]
)
def test_the_job_reads_each_sample_once_in_one_order(source, folder, tmp_path):
    """Only a stream that cannot be divided is read by each worker of each process; the page has the same numbers."""
    rows = {each: row(source, folder, tmp_path, world_size=each[0], num_workers=each[1]) for each in JOBS}

    factors = {each: each[0] * max(1, each[1]) if source == GENERIC else 1 for each in JOBS}
    assert {each: found for each, (found, _) in rows.items()} == {each: (factors[each], 0, 0) for each in JOBS}
    assert all(trained == rows[1, 0][1] for _, trained in rows.values())
    line = f"| {source} | " + " | ".join(f"{found[0]:.2f}" for found, _ in rows.values()) + " | 0 | 0 | yes |"
    if os.environ.get("RUNNERKIT_WRITE_STREAM_TABLE"):
        lines.append(line)
        write_section("streams", "\n".join(lines), PAGE, command=COMMAND)
    assert line in PAGE.read_text()


COMMAND = "RUNNERKIT_WRITE_STREAM_TABLE=1 pytest tests/data/test_stream_sources.py -k reads_each"
lines = [
    "| reads of each sample, processes x workers | "
    + " | ".join(f"{each} x {workers}" for each, workers in JOBS)
    + " | missed | repeated | order of one process |",
    "|---|" + "---:|" * (len(JOBS) + 2) + "---|",
]
