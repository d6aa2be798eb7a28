"""Samples and tokens per second of the training, between two logged steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from runnerkit.loop.attributes import ProcessState
from runnerkit.types import Metrics, Scalar

if TYPE_CHECKING:
    from runnerkit.callback import IRunner

_MARK = "\0"  # before the names in the queue of steps, where the user's metrics may have the same


class Throughput(ProcessState):
    """A clock of the training loader under way, which validations within it stop.

    Times are the host's, without host synchronization: over many steps the host is as slow as the device whose queue it
    fills. Tokens are the batches' weights in this process, times the number of processes with other batches.
    """

    def __init__(self) -> None:
        self._since_s = 0.0
        self._num_samples = 0
        self._weight: Any = 0

    def start(self, runner: IRunner) -> None:
        """Begin a pass over a training loader."""
        self._since_s, self._num_samples = time.perf_counter(), runner.sample_step
        self._weight = runner.loader_pass.metrics.means.weight  # of the batches before an interruption

    def take(self, runner: IRunner) -> dict[str, Scalar]:
        """Return the throughput since the last call, as numbers or () tensors on the device."""
        now = time.perf_counter()
        seconds = max(now - self._since_s, 1e-9)
        rates: dict[str, Scalar] = {f"{_MARK}samples/s": (runner.sample_step - self._num_samples) / seconds}
        weight = runner.loader_pass.metrics.means.weight
        if runner.batch_weight is not None:
            rates[f"{_MARK}tokens/s"] = (weight - self._weight) * (runner.loader_pass.num_processes / seconds)
        self._since_s, self._num_samples, self._weight = now, runner.sample_step, weight
        return rates

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock in the body."""
        stopped_s = time.perf_counter()
        yield
        self._since_s += time.perf_counter() - stopped_s


def with_throughput(metrics: Mapping[str, float]) -> Metrics:
    """Return a queued step's metrics with the throughput under its own name, unless the user logs another by it."""
    rates = {name[len(_MARK) :]: value for name, value in metrics.items() if name.startswith(_MARK)}
    return {**rates, **without_throughput(metrics)}


def without_throughput(metrics: Mapping[str, float]) -> Metrics:
    """Return a queued step's metrics without the throughput."""
    return {name: value for name, value in metrics.items() if not name.startswith(_MARK)}
