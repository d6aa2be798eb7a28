"""Compilation and activation checkpointing of a model's blocks, in runnerkit and hand-written, each in its own process.

python -m benchmarks.regions

A model of 12 transformer blocks: the time until the first step has ended, which includes the compilation without any
cache, the time of a later step, and the bytes of activations that a forward pass keeps. `--write` writes the table to
RESULTS.md.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.results import conditions, write_section

WIDTH, LENGTH, BATCH_SIZE, NUM_BLOCKS, NUM_STEPS = 128, 64, 8, 12, 12


class Block(nn.Module):
    """A transformer block before its residual additions are normalized."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.first(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        added: Tensor = x + self.mlp(self.second(x))
        return added


class CheckpointedBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return result


def make_model(kind: type[Block] = Block) -> nn.Module:
    """Make the same model whatever the class of its blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(NUM_BLOCKS)))


def batches() -> Iterator[Tensor]:
    """Yield the same batches each time."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        yield torch.randn(BATCH_SIZE, LENGTH, WIDTH, generator=generator)


class Kept:
    """Counts bytes of activations while it is entered."""

    def __init__(self) -> None:
        self.bytes = 0
        self._seen: dict[int, Tensor] = {}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda tensor: tensor)

    def _keep(self, tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if not isinstance(tensor, nn.Parameter) and address not in self._seen:
            self._seen[address] = tensor
            self.bytes += tensor.untyped_storage().nbytes()
        return tensor


def by_hand(model: nn.Module) -> tuple[list[float], int]:
    """Return the times at the ends of the steps, from the start, and the bytes kept in the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    kept, ends, began = Kept(), [], time.perf_counter()
    for number, batch in enumerate(batches(), start=1):
        with kept.hooks if number == NUM_STEPS else torch.enable_grad():
            loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ends.append(time.perf_counter() - began)
    return ends, kept.bytes


def compiled_by_hand() -> nn.Module:
    model = make_model()
    for block in model:  # type: ignore[attr-defined]  # a Sequential
        block.compile()
    return model


def with_runnerkit(**options: Any) -> tuple[list[float], int]:
    from runnerkit import dl

    kept, ends = Kept(), []

    class Training(dl.Runner):
        def handle_batch(self, batch: Tensor) -> None:
            with kept.hooks if self.loader_batch_step == NUM_STEPS else torch.enable_grad():
                self.batch_metrics["loss"] = self.model(batch).square().mean()

    class Watch(dl.Callback):
        def on_batch_end(self, runner: dl.IRunner) -> None:
            ends.append(time.perf_counter() - began)

    model, began = make_model(), time.perf_counter()
    Training().train(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        loaders={"train": list(batches())},
        callbacks=[dl.BackwardCallback("loss"), dl.OptimizerCallback("loss"), Watch(dl.CallbackOrder.External)],
        engine=dl.CPUEngine(**options),
    )
    return ends, kept.bytes


REGIONS = {"compile": {"modules": [Block]}}
CASES: dict[str, Callable[[], tuple[list[float], int]]] = {
    "raw PyTorch": lambda: by_hand(make_model()),
    "runnerkit": with_runnerkit,
    "raw PyTorch, `checkpoint` in each block": lambda: by_hand(make_model(CheckpointedBlock)),
    "runnerkit, `checkpoint_modules=[Block]`": partial(with_runnerkit, checkpoint_modules=[Block]),
    "raw PyTorch, `torch.compile(model)`": lambda: by_hand(torch.compile(make_model())),  # type: ignore[arg-type]
    "runnerkit, `compile=True`": partial(with_runnerkit, compile=True),
    "raw PyTorch, `block.compile()`": lambda: by_hand(compiled_by_hand()),
    'runnerkit, `compile={"modules": [Block]}`': partial(with_runnerkit, **REGIONS),
    "runnerkit, both": partial(with_runnerkit, checkpoint_modules=[Block], **REGIONS),
}


def measured(name: str) -> tuple[float, float, int]:
    """Return the seconds until the first step has ended, those of a later step, and the bytes kept."""
    command = [sys.executable, "-m", "benchmarks.regions", "--case", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    ends, num_bytes = json.loads(output.splitlines()[-1])
    steps = [end - begin for begin, end in pairwise(ends[1:-1])]  # hooks are in the last one
    return ends[0], statistics.median(steps), num_bytes


def main() -> None:
    """Measure each case in turns, print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write the table to RESULTS.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        torch.set_num_threads(1)
        print(json.dumps(CASES[options.case]()))
        return
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in CASES}
    for _ in range(options.rounds):
        for name, values in found.items():
            values.append(measured(name))
    rows = ["| | first step, s | a step, ms | ratio | activations, MB |", "|---|---:|---:|---:|---:|"]
    raw = found["raw PyTorch"]
    for name, values in found.items():
        ratio = statistics.median(mine[1] / theirs[1] for mine, theirs in zip(values, raw, strict=True))
        first, step, num_bytes = (statistics.median(column) for column in zip(*values, strict=True))
        rows.append(f"| {name} | {first:.1f} | {1e3 * step:.0f} | {ratio:.2f} | {num_bytes / 1e6:.0f} |")
    text = "\n".join([f"{NUM_BLOCKS} transformer blocks of width {WIDTH}. {conditions(options.rounds)}", "", *rows])
    print(text)
    if options.write:
        title = "Compilation and checkpointing of a model's blocks"
        write_section("regions", text, command="python -m benchmarks.regions --write", title=title)


if __name__ == "__main__":
    main()
