"""Time from a resume at 90 % of a stream to its first batch, beside a fresh start and beside other libraries' resumes.

python -m benchmarks.stream_resume

The stream is 1 GB of JSON lines in 128 files of about 8,000 samples. Each contender is set up as in a training program
without workers, and is asked for one batch of 32. Positions are those after 90 % of the samples; libraries that can
only find theirs by reading are read up to there before the measurement. Contenders run in turns in each round, and the
ratios are those to the fresh start of the same library in the same round. Results are in RESULTS.md.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from benchmarks.results import conditions, write_section
from runnerkit.data import EpochStepsLoaderWrapper, ShardedFiles
from runnerkit.sampling.sharding import batches_of, share_of, start_epoch

NUM_FILES, FILE_SIZE, BATCH_SIZE = 128, 8192, 32
NUM_SAMPLES = NUM_FILES * FILE_SIZE
NUM_STEPS = int(0.9 * NUM_SAMPLES / BATCH_SIZE)
PLACE: dict[str, Any] = {"key": "train", "training": True, "rank": 0, "world_size": 1, "seed": 42}


def read(path: Path, start: int = 0) -> Iterator[Any]:
    """Yield the samples of a file; those before `start` are not decoded."""
    with path.open() as file:
        for line in islice(file, start, None):
            yield json.loads(line)


class Lines(IterableDataset[Any]):
    """A stream without a position of its own."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[Any]:
        for path in self.paths:
            yield from read(path)


def hugging_face(paths: list[Path]) -> Any:
    """Return the files as a Hugging Face stream."""
    import datasets

    datasets.disable_progress_bars()
    files = [str(path) for path in paths]
    return datasets.load_dataset(
        "json", data_files=files, split="train", streaming=True, cache_dir=str(paths[0].parent)
    )


def stateful(dataset: Any) -> Any:
    """Return torchdata's loader of a stream."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    return StatefulDataLoader(dataset, batch_size=BATCH_SIZE, collate_fn=list)


def first_batch(batches: Any) -> None:
    """Fetch one batch."""
    assert len(next(iter(batches))) == BATCH_SIZE


class OfRunnerkit:
    """A loader of runnerkit whose position is computed, or noted while the stream is read."""

    def __init__(self, dataset: Any) -> None:
        loader = DataLoader(dataset, BATCH_SIZE, collate_fn=list)
        self.loader = EpochStepsLoaderWrapper(loader, NUM_STEPS)

    def position(self) -> Any:
        """Return the position at 90 %."""
        share = self.loader.shard(**PLACE)
        start_epoch(share, 1)
        for _ in batches_of(share):
            pass
        return share_of(share).position

    def start(self, position: Any = None) -> None:
        """Set up, and fetch one batch."""
        share = self.loader.shard(**PLACE)
        if position is not None:
            share_of(share).skip(position)
        start_epoch(share, 1)
        first_batch(batches_of(share))


def contenders(paths: list[Path]) -> dict[str, tuple[Callable[[], None], Callable[[], None]]]:
    """Return a fresh start and a resume by name."""
    sizes = [FILE_SIZE] * NUM_FILES
    files = OfRunnerkit(ShardedFiles(paths, read, sizes=sizes, shuffle=256, lanes=(4, 2)))
    stream = hugging_face(paths)
    stream.lanes = (4, 2)
    streamed = OfRunnerkit(stream)
    places = {"files": files.position(), "streamed": streamed.position()}
    own = hugging_face(paths)
    loader = stateful(hugging_face(paths))
    for _ in islice(own, NUM_STEPS * BATCH_SIZE):
        pass
    for _ in islice(loader, NUM_STEPS):
        pass
    states = {"own": own.state_dict(), "loader": loader.state_dict()}

    def resume_own() -> None:
        fresh = hugging_face(paths)
        fresh.load_state_dict(states["own"])
        first_batch(DataLoader(fresh, BATCH_SIZE, collate_fn=list))

    def resume_loader() -> None:
        fresh = stateful(hugging_face(paths))
        fresh.load_state_dict(states["loader"])
        first_batch(fresh)

    def resume_plain() -> None:
        fresh = stateful(Lines(paths))
        fresh.load_state_dict(plain_state)
        first_batch(fresh)

    plain = stateful(Lines(paths))
    for _ in islice(plain, NUM_STEPS):
        pass
    plain_state = plain.state_dict()
    start_own = lambda: first_batch(DataLoader(hugging_face(paths), BATCH_SIZE, collate_fn=list))  # noqa: E731
    return {
        "runnerkit, ShardedFiles": (files.start, lambda: files.start(places["files"])),
        "runnerkit, Hugging Face stream": (streamed.start, lambda: streamed.start(places["streamed"])),
        "Hugging Face, load_state_dict": (start_own, resume_own),
        "Hugging Face, skip": (
            start_own,
            lambda: first_batch(
                DataLoader(hugging_face(paths).skip(NUM_STEPS * BATCH_SIZE), BATCH_SIZE, collate_fn=list)
            ),
        ),
        "StatefulDataLoader of a Hugging Face stream": (
            lambda: first_batch(stateful(hugging_face(paths))),
            resume_loader,
        ),
        "StatefulDataLoader of an IterableDataset": (lambda: first_batch(stateful(Lines(paths))), resume_plain),
    }


def timed(run: Callable[[], None]) -> float:
    """Return the seconds that a call takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def main() -> None:
    """Write the files, measure, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md")
    options = parser.parse_args()
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{number:03d}.jsonl") for number in range(NUM_FILES)]
        text = "x" * 930
        for number, path in enumerate(paths):
            lines = (json.dumps({"n": number * FILE_SIZE + each, "text": text}) for each in range(FILE_SIZE))
            path.write_text("\n".join(lines))
        size = sum(path.stat().st_size for path in paths) / 1e9
        runs = contenders(paths)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
        for _ in range(options.rounds):
            for name, (start, resume) in runs.items():
                times[name].append((timed(start), timed(resume)))
    rows = ["| | start, s | resume at 90 %, s | ratio |", "|---|---:|---:|---:|"]
    for name, pairs in times.items():
        starts, resumes, ratios = zip(*((start, resume, resume / start) for start, resume in pairs), strict=True)
        middle = [statistics.median(each) for each in (starts, resumes, ratios)]
        rows.append(f"| {name} | {middle[0]:.3f} | {middle[1]:.3f} | {middle[2]:.1f} |")
    table = "\n".join(rows)
    text = f"{size:.2f} GB of JSON lines in {NUM_FILES} files. {conditions(options.rounds)}\n\n{table}"
    print(text)
    if options.write:
        title = "Start and resume of a stream"
        write_section("stream resume", text, command="python -m benchmarks.stream_resume --write", title=title)


if __name__ == "__main__":
    main()
