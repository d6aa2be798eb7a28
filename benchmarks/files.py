"""Time of training steps on data in files: runnerkit's streams beside a hand-written IterableDataset.

python -m benchmarks.files

A pass is 64 files of 1,024 samples of 64 float32, with a step of the MLP of the step benchmarks on each batch of 32.
All contenders run in each round, so that a slowdown of the machine affects all of them: with workers, one pass after
the other; without, they take turns of 60 steps, in random order, and are measured in CPU time, from the fifth step of a
turn on, when the caches hold their data again. Prints the median and the range of the rounds, and the median of the
ratios to the first contender within a round. The hand-written data set divides the files among the workers and shuffles
blocks of 256 samples, as ShardedFiles does within a lane. By default there is a lane for each file, so that batches mix
64 files; a hand-written shuffle buffer of as many samples is the equal. Streams that do not shuffle are compared with
one that reads in order, as a block is filled at a stroke, which is faster. No hand-written data set has an order that
is shared by other numbers of workers, or a position to resume from. Without workers the function calls of a step are
counted too, those of the model included. `--write` writes the tables to RESULTS.md.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.results import conditions, write_section
from benchmarks.steps.work import make_model, make_optimizer
from benchmarks.tensor_loader import Contender, table
from runnerkit.data import EpochStepsLoaderWrapper, ShardedFiles
from runnerkit.sampling.sharding import batches_of, shard_loader, start_epoch

NUM_FILES, FILE_SIZE, BATCH_SIZE, BLOCK = 64, 1024, 32, 256
TURN, COLD = 60, 4  # no multiple of the steps of a file: files are opened at all places of a turn


def read(path: str, start: int = 0) -> Iterator[tuple[Tensor, int]]:
    """Yield the samples of a file: features, (64,) float32, and a class."""
    rows = np.load(path)
    for row in rows[start:]:
        yield torch.from_numpy(row), int(row[0] > 0)


def read_batches(path: str, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield whole batches of a file."""
    features = torch.from_numpy(np.load(path))
    for batch in features.split(BATCH_SIZE)[start:]:
        yield batch, (batch[:, 0] > 0).long()


class ByHand(IterableDataset[Any]):
    """Files divided among the workers, with shuffled blocks of samples."""

    def __init__(self, files: list[str], read_file: Callable[[str], Iterator[Any]], block: int) -> None:
        self.files, self.read_file, self.block = files, read_file, block

    def own(self, files: list[str]) -> list[str]:
        """Return the files of this worker."""
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return files[number::count]

    def __iter__(self) -> Iterator[Any]:
        for path in self.own(random.Random(42).sample(self.files, len(self.files))):
            samples = self.read_file(path)
            while block := list(islice(samples, self.block)):
                random.shuffle(block)
                yield from block


class Buffered(ByHand):
    """Files divided among the workers, with a shuffle buffer of 64 blocks."""

    def __iter__(self) -> Iterator[Any]:
        samples = super().__iter__()
        buffer = list(islice(samples, NUM_FILES * self.block))
        for sample in samples:
            place = random.randrange(len(buffer))
            yield buffer[place]
            buffer[place] = sample
        random.shuffle(buffer)
        yield from buffer


class InOrder(ByHand):
    """Files divided among the workers, without random numbers."""

    def __iter__(self) -> Iterator[Any]:
        for path in self.own(self.files):
            yield from self.read_file(path)


class DrawsNothing(InOrder):
    """The same, and says so."""

    draws_nothing = True


class Shards(IterableDataset[Any]):
    """A stream that can be divided."""

    draws_nothing = True

    def __init__(
        self, files: list[str], read_file: Callable[[str], Iterator[Any]], lanes: tuple[int, int] | None = None
    ) -> None:
        self.files, self.read_file, self.num_shards, self.lanes = files, read_file, len(files), lanes

    def shard(self, num_shards: int, index: int) -> Iterator[Any]:
        return self.read_file(self.files[index])

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.num_shards):
            yield from self.shard(self.num_shards, index)


def contenders(files: list[str], *, whole_batches: bool, num_workers: int) -> dict[str, dict[str, Contender]]:
    """Return the contenders that shuffle, and those that do not, by name; the first is the baseline."""
    read_file, size, block = (read_batches, FILE_SIZE // BATCH_SIZE, 8) if whole_batches else (read, FILE_SIZE, BLOCK)
    options: dict[str, Any] = {"batch_size": None if whole_batches else BATCH_SIZE, "num_workers": num_workers}
    sizes = [size] * len(files)
    place: dict[str, Any] = {"key": "train", "training": True, "rank": 0, "world_size": 1, "seed": 42}
    num_steps = len(files) * FILE_SIZE // BATCH_SIZE

    def ours(dataset: Any) -> Contender:
        loader = DataLoader(dataset, **options)
        share = (
            EpochStepsLoaderWrapper(loader, num_steps).shard(**place)
            if isinstance(dataset, Shards)
            else shard_loader(loader, **place)
        )

        def epoch() -> Iterator[None]:
            start_epoch(share, 1)
            return steps(batches_of(share))

        return epoch

    def by_hand(kind: type[ByHand]) -> Contender:
        return lambda: steps(iter(DataLoader(kind(files, read_file, block), **options)))

    one = (1, max(1, num_workers))
    shuffled = {
        "hand-written": by_hand(ByHand),
        "ShardedFiles, a lane per reader": ours(ShardedFiles(files, read_file, sizes=sizes, shuffle=block, lanes=one)),
        "hand-written, with a buffer": by_hand(Buffered),
        "ShardedFiles, a lane per file": ours(ShardedFiles(files, read_file, sizes=sizes, shuffle=block)),
    }
    in_order = {
        "hand-written": by_hand(InOrder),
        "a stream with shards, a lane per reader": ours(Shards(files, read_file, one)),
        "a stream with shards, a lane per file": ours(Shards(files, read_file)),
    }
    if num_workers == 0:  # each worker would read the whole stream
        shuffled["any other stream"] = ours(ByHand(files, read_file, block))
        in_order["any other stream, draws_nothing"] = ours(DrawsNothing(files, read_file, block))
        in_order["any other stream"] = ours(InOrder(files, read_file, block))
    return {"shuffled": shuffled, "in order": in_order}


def table_of_turns(fields: dict[str, Contender], *, num_rounds: int) -> str:
    """Measure the CPU time of contenders without workers in turns of a few steps."""
    num_turns = NUM_FILES * FILE_SIZE // BATCH_SIZE // TURN
    rounds: list[dict[str, float]] = []
    for _ in range(num_rounds):
        runs = {name: iter(contender()) for name, contender in fields.items()}
        rounds.append(dict.fromkeys(fields, 0.0))
        for turn in range(num_turns):
            for name in random.Random(turn).sample([*fields], len(fields)):  # so that all run behind each other
                _take(runs[name], COLD)
                began = time.thread_time()
                _take(runs[name], TURN - COLD)
                rounds[-1][name] += time.thread_time() - began
    num_steps, first = num_turns * (TURN - COLD), next(iter(fields))
    lines = ["| one step | median, µs of CPU | range | ratio to the first | range |", "|---|---|---|---|---|"]
    for name in fields:
        times = [1e6 * each[name] / num_steps for each in rounds]
        ratios = [each[name] / each[first] for each in rounds]
        lines.append(
            f"| {name} | {median(times):.0f} | {min(times):.0f} to {max(times):.0f} | {median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} |"
        )
    return "\n".join(lines)


def _take(run: Iterator[None], num_steps: int) -> None:
    for _ in range(num_steps):
        next(run)


def calls_per_step(contender: Contender) -> float:
    """Count the function calls, those of C included, from the 20th to the 120th step."""
    run = iter(contender())
    for _ in range(20):
        next(run)
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    for _ in range(100):
        next(run)
    sys.setprofile(None)
    return calls / 100


def steps(batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Train on the batches."""
    model, criterion = make_model(), nn.CrossEntropyLoss()
    optimizer = make_optimizer(model)
    for features, targets in batches:
        optimizer.zero_grad()
        criterion(model(features), targets).backward()
        optimizer.step()
        yield


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the tables to RESULTS.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts = []
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, f"{number:03d}.npy")) for number in range(NUM_FILES)]
        for path in files:
            np.save(path, np.random.default_rng(42).standard_normal((FILE_SIZE, 64), dtype=np.float32))
        for whole_batches in (False, True):
            for num_workers in (0, 2):
                what = "batches" if whole_batches else f"samples, {BATCH_SIZE} a batch"
                groups = contenders(files, whole_batches=whole_batches, num_workers=num_workers)
                for order, fields in groups.items():
                    parts.append(f"A stream of {what}, {order}, {num_workers} workers:")
                    if num_workers:
                        parts.append(table(fields, num_rounds=options.rounds, device=torch.device("cpu")))
                    else:
                        parts.append(table_of_turns(fields, num_rounds=options.rounds))
                        calls = {name: calls_per_step(each) for name, each in fields.items()}
                        counts = ", ".join(f"{name} {number:.0f}" for name, number in calls.items())
                        parts.append(f"Function calls per step: {counts}.")
    text = "\n\n".join([conditions(options.rounds), *parts])
    print(text)
    if options.write:
        title = "Training steps on data in files"
        write_section("streams", text, command="python -m benchmarks.files --write", title=title)


if __name__ == "__main__":
    main()
