"""CPU time of a training step beside a hand-written loop with the same DataLoader, for several kinds of data.

python -m benchmarks.kinds_of_data --rounds 10

The loop takes its turns between the runner's steps, in the same thread, so that both share the machine's noise. Samples
are cheap and batches are small, so that the overhead shows: a step takes less than a millisecond.
"""

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from benchmarks.steps.work import make_model, make_optimizer
from runnerkit import dl

NUM_ROWS = 4096  # distinct ones
NUM_STEPS, TURN, COLD, NUM_WARM_TURNS = 240, 20, 4, 2  # a turn's first steps are not timed, while caches are cold
FEATURES = torch.randn(NUM_ROWS, 64, generator=torch.Generator().manual_seed(0))
TARGETS = FEATURES[:, :10].argmax(dim=1)


class Rows(Dataset[tuple[Tensor, Tensor]]):
    """Map-style data set of cheap samples."""

    def __init__(self, batch_size: int) -> None:
        self.length = batch_size * NUM_STEPS * 2

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return FEATURES[index % NUM_ROWS], TARGETS[index % NUM_ROWS]


class Samples(IterableDataset[tuple[Tensor, Tensor]]):
    """Stream of the same samples."""

    def __init__(self, batch_size: int) -> None:
        self.rows = Rows(batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.rows[index] for index in range(len(self.rows)))


class Batches(IterableDataset[tuple[Tensor, Tensor]]):
    """Stream of batches."""

    def __init__(self, batch_size: int) -> None:
        self.batches = list(zip(FEATURES.split(batch_size), TARGETS.split(batch_size), strict=True))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return (self.batches[number % len(self.batches)] for number in range(NUM_STEPS * 2))


def loader(kind: str, batch_size: int) -> DataLoader[Any]:
    """Make the loader of one kind of data; "declared" stands for a data set with ``draws_nothing = True``."""
    if kind == "tensors":
        indices = torch.arange(len(Rows(batch_size))) % NUM_ROWS
        return DataLoader(TensorDataset(FEATURES[indices], TARGETS[indices]), batch_size, shuffle=True)
    name, _, declared = kind.partition(", ")
    dataset: Any = {"map": Rows, "stream of samples": Samples, "stream of batches": Batches}[name](batch_size)
    dataset.draws_nothing = bool(declared)
    if name == "map":
        return DataLoader(dataset, batch_size, shuffle=True)
    return DataLoader(dataset, None if name == "stream of batches" else batch_size)


KINDS = [
    "tensors", "map", "map, declared", "stream of samples", "stream of batches", "stream of batches, declared",
]  # fmt: skip


def by_hand(batches: Any) -> Iterator[None]:
    """Train and sum the loss; yield after each step."""
    model, criterion = make_model(), nn.CrossEntropyLoss()
    optimizer = make_optimizer(model)
    total, num_samples = torch.zeros((), dtype=torch.float64), 0
    for features, targets in batches:
        optimizer.zero_grad()
        loss = criterion(model(features), targets)
        loss.backward()
        optimizer.step()
        total += loss.detach() * len(targets)
        num_samples += len(targets)
        yield


class Turns(dl.Callback):
    """Time turns of the runner's steps, and of the other loop between them; its own call counts as the runner's.

    Attributes:
        times: seconds of a turn of the runner, and of the loop's next.
    """

    def __init__(self, other: Iterator[None]) -> None:
        super().__init__(order=dl.CallbackOrder.External)
        self.other = other
        self.times: list[tuple[float, float]] = []
        self._num_steps, self._began = 0, 0.0

    def on_step_end(self, runner: dl.IRunner) -> None:
        self._num_steps += 1
        if self._num_steps == COLD:
            self._began = time.thread_time()
        elif self._num_steps == COLD + TURN:
            mine = time.thread_time() - self._began
            self._steps_of_other(COLD)
            began = time.thread_time()
            self._steps_of_other(TURN)
            self.times.append((mine, time.thread_time() - began))
            self._num_steps = 0

    def _steps_of_other(self, num_steps: int) -> None:
        for _ in range(num_steps):
            next(self.other)


def measure(kind: str, batch_size: int) -> tuple[float, float, float]:
    """Return the median ratio of neighboring turns, and the median microseconds of the runner's and the loop's step."""
    turns, model = Turns(by_hand(loader(kind, batch_size))), make_model()
    dl.SupervisedRunner().train(
        model=model,
        criterion=nn.CrossEntropyLoss(),
        optimizer=make_optimizer(model),
        loaders={"train": loader(kind, batch_size)},
        callbacks=[turns],
        engine=dl.CPUEngine(),
        loggers={"console": None},
        num_steps=NUM_STEPS,
    )
    mine, others = zip(*turns.times[NUM_WARM_TURNS:], strict=True)
    ratio = median(one / other for one, other in zip(mine, others, strict=True))
    return ratio, 1e6 * median(mine) / TURN, 1e6 * median(others) / TURN


def main() -> None:
    """Print a table of the medians over rounds, each round with all kinds of data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8, help="samples; a divisor of 4096")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rounds = [[measure(kind, options.batch_size) for kind in KINDS] for _ in range(options.rounds)]
    print("| data | hand-written, µs | runnerkit, µs | ratio | lowest to highest round |\n|---|---:|---:|---:|---:|")
    for kind, results in zip(KINDS, zip(*rounds, strict=True), strict=True):
        ratios, mine, others = zip(*results, strict=True)
        print(
            f"| {kind} | {median(others):.0f} | {median(mine):.0f} | {median(ratios):.2f} | "
            f"{min(ratios):.2f} to {max(ratios):.2f} |"
        )


if __name__ == "__main__":
    main()
