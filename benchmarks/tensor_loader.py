"""Time of a shuffled pass over tensors in memory with TensorLoader, raw PyTorch and hand-written slicing.

python benchmarks/tensor_loader.py, or with --device cuda

All contenders run in each round, so that a slowdown of the machine affects all of them. Prints the median and the range
of the rounds, and the median of the ratios to the first contender within a round. Only fetching is measured: no model,
no copy to another device. Results are in RESULTS.md.
"""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from runnerkit.data import TensorLoader
from runnerkit.sampling.sharding import shard_loader

Contender = Callable[[], Iterator[Any]]


def cases(device: torch.device) -> dict[str, tuple[Tensor, Tensor, int]]:
    """Return features, targets and batch size for a few large samples and for many small ones."""
    images = torch.randint(0, 256, (50_000, 3, 32, 32), dtype=torch.uint8, device=device)
    rows = torch.randn(200_000, 20, device=device)
    return {
        "50,000 uint8 images (3, 32, 32), batches of 256": (images, _classes(images), 256),
        "200,000 rows of 20 float32, batches of 1,024": (rows, _classes(rows), 1024),
    }


def _classes(features: Tensor) -> Tensor:
    return torch.randint(0, 10, (len(features),), device=features.device)


def by_hand(features: Tensor, targets: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Index with slices of a permutation, as commonly written."""
    order = torch.randperm(len(features), device=features.device)
    for start in range(0, len(features), batch_size):
        batch = order[start : start + batch_size]
        yield features[batch], targets[batch]


def by_hand_with_index_select(features: Tensor, targets: Tensor, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Index with `index_select`, which is faster than brackets for a single index."""
    order = torch.randperm(len(features), device=features.device)
    for batch in order.split(batch_size):
        yield features.index_select(0, batch), targets.index_select(0, batch)


def contenders(features: Tensor, targets: Tensor, batch_size: int) -> dict[str, Contender]:
    """Return the contenders by name; the first is the baseline."""
    ours = TensorLoader(features, targets, batch_size=batch_size, shuffle=True)
    shared = shard_loader(ours, key="train", training=True, rank=0, world_size=1, seed=42)
    raw = DataLoader(TensorDataset(features, targets), batch_size=batch_size, shuffle=True)
    return {
        "TensorLoader under an engine": lambda: iter(shared),
        "TensorLoader": lambda: iter(ours),
        "hand-written, index_select": lambda: by_hand_with_index_select(features, targets, batch_size),
        "hand-written, brackets": lambda: by_hand(features, targets, batch_size),
        "DataLoader(TensorDataset)": lambda: iter(raw),
    }


def seconds(contender: Contender, device: torch.device) -> float:
    """Time one pass."""
    begin = time.perf_counter()
    for _ in contender():
        pass
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def table(fields: dict[str, Contender], *, num_rounds: int, device: torch.device) -> str:
    """Measure the contenders in turns; the first round is a warm-up and is not counted."""
    rounds = [{name: seconds(each, device) for name, each in fields.items()} for _ in range(num_rounds + 1)][1:]
    first = next(iter(fields))
    lines = ["| one pass | median, ms | range | ratio to the first |", "|---|---|---|---|"]
    for name in fields:
        times = [1000 * each[name] for each in rounds]
        ratio = statistics.median(each[name] / each[first] for each in rounds)
        spread = f"{min(times):.1f} to {max(times):.1f}"
        lines.append(f"| {name} | {statistics.median(times):.1f} | {spread} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", type=torch.device, default="cpu", help="device of the tensors (default: cpu)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(42)
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {options.threads} threads"
    if options.device.type == "cuda":
        machine += f", {torch.cuda.get_device_name(options.device)}"
    print(f"{machine}; torch {torch.__version__}, python {platform.python_version()}; {options.rounds} rounds")
    for name, (features, targets, batch_size) in cases(options.device).items():
        fields = contenders(features, targets, batch_size)
        print(f"\n{name}\n\n{table(fields, num_rounds=options.rounds, device=options.device)}")


if __name__ == "__main__":
    main()
