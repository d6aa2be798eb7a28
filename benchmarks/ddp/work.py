"""The work of cases c and d, shared by all candidates: two processes over gloo; start-up, steps and loader end.

usage: python -m benchmarks.ddp.raw NUM_METRICS [weighted] [wide]

With "weighted", each batch weighs as much as the sum of its targets, which the other process does not know.
With "wide", the model has more than a million parameters, so that a step takes as long as those of small real models.
"""

import json
import os
import sys
import time
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import TensorDataset

from benchmarks.steps import work
from benchmarks.turns import Turns

WORLD_SIZE, NUM_STEPS, BATCH_SIZE = 2, 500, 32
WIDE = 16384
STEPS_A_TURN = 25  # while one process waits for its turn, the other waits in the all-reduce
UNTIMED_STEPS = 5  # of a turn, while the caches still hold the data of the job before
COLLECTIVES = ("all_reduce", "all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier")


class Notes:
    """Times of the steps, by the clock that all processes share and in CPU time, and of the loader's end."""

    def __init__(self, path: str) -> None:
        self.path, self.times, self.cpu_times, self.num_collectives = path, [], [], 0
        self.at_end = (0.0, 0)
        self.turns: Turns | None = None

    def begin(self) -> None:
        """Start taking turns, if rank zero, and counting collectives; nested ones count once."""
        if dist.get_rank() == 0:
            self.turns = Turns(one_core=False)
        depth = 0

        def counted(collective: Any) -> Any:
            @wraps(collective)
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal depth
                self.num_collectives += depth == 0
                depth += 1
                try:
                    return collective(*args, **kwargs)
                finally:
                    depth -= 1

            return call

        for name in COLLECTIVES:
            setattr(dist, name, counted(getattr(dist, name)))

    def step(self) -> None:
        if not self.times:
            _stay_on_core(dist.get_rank())
        if self.turns is not None and len(self.times) % STEPS_A_TURN == 0:
            self.turns.wait()
        self.times.append(time.time() - (self.turns.waited if self.turns is not None else 0))
        self.cpu_times.append(time.thread_time())
        self.at_end = (time.perf_counter(), self.num_collectives)

    def loader_is_over(self) -> None:
        began, before = self.at_end
        figures = {
            "start_s": self.times[0] - float(os.environ.get("BENCHMARK_STARTED_AT", "nan")),
            "step_us": 1e6 * mean_of_steps(self.times),
            "cpu_us": 1e6 * mean_of_steps(self.cpu_times),
            "end_ms": 1000 * (time.perf_counter() - began),
            "collectives": self.num_collectives - before,
        }
        Path(self.path).write_text(json.dumps(figures))


def mean_of_steps(times: list[float]) -> float:
    """Return the mean duration of the timed steps between the times of their ends."""
    steps = [end - start for start, end in pairwise(times)]
    return fmean(step for number, step in enumerate(steps) if number % STEPS_A_TURN >= UNTIMED_STEPS)


def _stay_on_core(number: int) -> None:
    """Pin all threads of this process to its own core, since their placement differs between starts."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[number % len(cores)]})


def data() -> TensorDataset:
    return TensorDataset(*map(torch.cat, zip(*work.make_batches(WORLD_SIZE * NUM_STEPS), strict=True)))


def numbers(logits: Tensor, *, num_metrics: int) -> dict[str, Tensor]:
    """Return `num_metrics - 1` metrics in addition to the loss."""
    if num_metrics == 1:
        return {}
    mean = logits.detach().mean()
    return {f"metric{number}": mean for number in range(num_metrics - 1)}


def num_metrics_asked() -> int:
    """Read the number of metrics from the command line."""
    return int(sys.argv[1])


def is_weighted() -> bool:
    """Read from the command line whether batches have weights."""
    return "weighted" in sys.argv[2:]


def width() -> int:
    """Read the width of the model from the command line."""
    return WIDE if "wide" in sys.argv[2:] else 64


def report(path: str, loss: float) -> None:
    print(json.dumps({**json.loads(Path(path).read_text()), "same": {"loss": loss}}), flush=True)
