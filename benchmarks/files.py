"""Time of training steps on data in files: ShardedFiles beside a hand-written IterableDataset.

python -m benchmarks.files

All contenders run in each round, so that a slowdown of the machine affects all of them. Prints the median and the range
of the rounds, and the median of the ratios to the first contender within a round. A pass is 64 files of 1,024 samples
of 64 float32, with a step of the MLP of the step benchmarks on each batch of 32. The hand-written data set divides the
files among the workers and shuffles blocks of 256 samples, as ShardedFiles does, but lacks an order that is shared by
other numbers of workers, and a position to resume from. Results are in RESULTS.md.
"""

import argparse
import os
import platform
import random
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.steps.work import make_model, make_optimizer
from benchmarks.tensor_loader import Contender, table
from runnerkit.data import ShardedFiles
from runnerkit.sampling.sharding import batches_of, shard_loader, start_epoch

NUM_FILES, FILE_SIZE, BATCH_SIZE, BLOCK = 64, 1024, 32, 256


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

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        files = random.Random(42).sample(self.files, len(self.files))
        for path in files[number::count]:
            samples = self.read_file(path)
            while block := list(islice(samples, self.block)):
                random.shuffle(block)
                yield from block


def contenders(files: list[str], *, whole_batches: bool, num_workers: int) -> dict[str, Contender]:
    """Return the contenders by name; the first is the baseline."""
    read_file, size, block = (read_batches, FILE_SIZE // BATCH_SIZE, 8) if whole_batches else (read, FILE_SIZE, BLOCK)
    options: dict[str, Any] = {"batch_size": None if whole_batches else BATCH_SIZE, "num_workers": num_workers}
    raw = DataLoader(ByHand(files, read_file, block), **options)
    dataset = ShardedFiles(files, read_file, sizes=[size] * len(files), shuffle=block)
    place = {"key": "train", "training": True, "rank": 0, "world_size": 1, "seed": 42}
    ours = shard_loader(DataLoader(dataset, **options), **place)

    def of_ours() -> Iterator[Any]:
        start_epoch(ours, 1)
        return batches_of(ours)

    return {"hand-written": lambda: steps(iter(raw)), "ShardedFiles": lambda: steps(of_ours())}


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
    options = parser.parse_args()
    torch.set_num_threads(1)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, 1 thread"
    print(f"{machine}; torch {torch.__version__}, python {platform.python_version()}; {options.rounds} rounds")
    with tempfile.TemporaryDirectory() as folder:
        files = [str(Path(folder, f"{number:03d}.npy")) for number in range(NUM_FILES)]
        for path in files:
            np.save(path, np.random.default_rng(42).standard_normal((FILE_SIZE, 64), dtype=np.float32))
        for whole_batches in (False, True):
            for num_workers in (0, 2):
                what = "batches" if whole_batches else f"samples, {BATCH_SIZE} a batch"
                fields = contenders(files, whole_batches=whole_batches, num_workers=num_workers)
                print(f"\nA stream of {what}, {num_workers} workers\n")
                print(table(fields, num_rounds=options.rounds, device=torch.device("cpu")))


if __name__ == "__main__":
    main()
