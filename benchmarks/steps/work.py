"""The work of case a, shared by all candidates: steps of an MLP 64-64-10 on prepared batches of 32."""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.calls import calls_per_step
from benchmarks.turns import Turns

# "log" and "bar" are "accuracy" with step metrics in CSV and TensorBoard, or with a progress bar.
VARIANTS = ("nothing", "loss", "accuracy", "log", "bar")
LOG_EVERY = 10
NUM_TURNS, NUM_WARM_TURNS = 50, 5  # per epoch; the warm-up turns are not timed
COLD_SHARE = 10  # the first tenth of a turn is not timed, while the caches hold the previous candidate's data
Batch = tuple[Tensor, Tensor]


class Batches:
    """Prepared batches, served in turns, that record when a turn begins and ends: every candidate's stopwatch.

    It adds no call to a step, and a framework that prefetches batches is timed over as many steps as the others.
    """

    batch_size = 32  # some frameworks read it

    def __init__(self, batches: list[Any], turns: Turns) -> None:
        self.batches, self.turns = batches, turns
        self.times: list[tuple[float, float]] = []  # the end of a turn, and the start of timing in the next
        self._ended = 0.0

    def mapped(self, change: Callable[[Batch], Any]) -> "Batches":
        """Return the converted batches, made in advance, with the same stopwatch."""
        other = Batches([change(each) for each in self.batches], self.turns)
        other.times = self.times
        return other

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.times.clear()
        # The last timed turn ends before the last batch, since some frameworks never request a batch after it.
        return chain.from_iterable(
            self._turn(*each) for each in [*self._turns, (len(self) - 1, len(self) - 1, len(self))]
        )

    @property
    def _turns(self) -> list[tuple[int, int, int]]:
        """The batch numbers at which each turn begins, starts to be timed, and ends."""
        ends = [number * (len(self) - 1) // NUM_TURNS for number in range(NUM_TURNS + 1)]
        return [(begin, begin + (end - begin) // COLD_SHARE, end) for begin, end in pairwise(ends)]

    def _turn(self, begin: int, timed_from: int, end: int) -> Iterator[Any]:
        return chain(
            self._next_turn(), self.batches[begin:timed_from], self._start_watch(), self.batches[timed_from:end]
        )

    def _next_turn(self) -> Iterator[Any]:
        self._ended = time.perf_counter()
        self.turns.wait()
        yield from ()

    def _start_watch(self) -> Iterator[Any]:
        self.times.append((self._ended, time.perf_counter()))
        yield from ()

    @property
    def step_us(self) -> float:
        """Mean microseconds per timed step."""
        seconds = sum(end - begin for (_, begin), (end, _) in pairwise(self.times[NUM_WARM_TURNS:]))
        return 1e6 * seconds / sum(end - timed_from for _, timed_from, end in self._turns[NUM_WARM_TURNS:])


class Trained(NamedTuple):
    """The result of a candidate's `train(batches, variant, folder)`: the epoch's means that the variant computes."""

    model: nn.Module
    loss: float | None = None
    accuracy: float | None = None


Train = Callable[[Batches, str, Path], Trained]


def make_batches(num_batches: int) -> list[Batch]:
    """Draw features, (32, 64) float32, and targets that depend on them, (32,) int64."""
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(64, 10, generator=generator)
    features = [torch.randn(32, 64, generator=generator) for _ in range(num_batches)]
    return [(each, (each @ teacher).argmax(dim=1)) for each in features]


def make_model(width: int = 64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))


def make_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def num_right(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.argmax(dim=1) == targets).sum()


def main(train: Train) -> None:
    """Train as the arguments specify, then print one line of JSON; all candidates agree on `same`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--variant", choices=VARIANTS, default="loss")
    parser.add_argument("--num-batches", type=int, default=5000)
    parser.add_argument("--count-calls", action="store_true", help="count calls in a step instead of timing it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    batches = Batches(make_batches(150 if options.count_calls else options.num_batches), Turns())
    with tempfile.TemporaryDirectory() as folder:
        if options.count_calls:
            figures = {"calls": calls_per_step(partial(_train_some, train, batches.batches, options.variant, folder))}
        trained = train(batches, options.variant, Path(folder))
        if not options.count_calls:
            figures = {"step_us": batches.step_us}
    print(json.dumps({**figures, "same": _same(trained, batches.batches)}))


def _train_some(train: Train, batches: list[Batch], variant: str, folder: str, num_steps: int) -> None:
    with tempfile.TemporaryDirectory(dir=folder) as own:
        train(Batches(batches[:num_steps], Turns()), variant, Path(own))


def _same(trained: Trained, batches: list[Batch]) -> dict[str, float]:
    """Include the trained model's loss, which depends on all steps, even in variants without metrics."""
    means = {name: value for name in ("loss", "accuracy") if (value := getattr(trained, name)) is not None}
    features, targets = (torch.cat(each) for each in zip(*batches[:50], strict=True))
    with torch.inference_mode():
        trained_loss = nn.functional.cross_entropy(trained.model(features), targets)
    return {**means, "loss of the trained model": trained_loss.item()}
