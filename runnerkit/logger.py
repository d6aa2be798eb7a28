"""The contract of a logger: numbers and pictures come in, files or a service take them; it never heard of a runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from runnerkit.host_copy import read_metrics_at_once
from runnerkit.types import Metrics, Scalar

Scope = Literal["batch", "loader"]  # one training step, or one pass over a loader


@dataclass(frozen=True)
class Step:
    """Where in a run a number was measured.

    Attributes:
        stage: name of the stage, "train" unless the user has several.
        loader: the loader's key, such as "train" or "valid".
        epoch: 1, 2, ... over all stages.
        batch: training steps made so far, over all stages.
    """

    stage: str
    loader: str
    epoch: int
    batch: int


class Histogram(NamedTuple):
    """How values are distributed.

    Attributes:
        counts: (B,) int64, of the values in [edges[i], edges[i + 1]); the last bin has its right edge too.
        edges: (B + 1,) float64, ascending.
    """

    counts: np.ndarray
    edges: np.ndarray


class PRCurve(NamedTuple):
    """What a binary classifier finds at each threshold, where a score >= threshold is taken for positive.

    Attributes:
        thresholds: (T,) float64, ascending from 0 to 1.
        true_positives, false_positives, true_negatives, false_negatives: (T,) int64 counts of samples.
        precision, recall: (T,) float64; 0 where nothing is taken for positive, or nothing is positive.
    """

    thresholds: np.ndarray
    true_positives: np.ndarray
    false_positives: np.ndarray
    true_negatives: np.ndarray
    false_negatives: np.ndarray
    precision: np.ndarray
    recall: np.ndarray


class ILogger(ABC):
    """Base of loggers. Only rank zero has any, so none of them tests the rank.

    The constructor stores and validates; files and sockets open in :meth:`setup`. `log_scalars` is a must; what else it
    can hold, it overrides. What it raises, `setup` aside, ends the run if it is essential; else it is warned of, and
    the run goes on without this logger.

    Attributes:
        is_essential: whether a run without it is of no use. The library's own files are, as a resumed run promises the
            same ones; a service that may be away is not. Set it on the object to have it otherwise.
        logdir: where it writes files, which one run at a time may; None writes none.
        log_batch_metrics: wants the numbers of single training steps (every ``log_every`` of them).
        log_epoch_metrics: wants the numbers of whole loaders.
    """

    is_essential: bool = False
    logdir: Path | None = None
    log_batch_metrics: bool = False
    log_epoch_metrics: bool = True

    def setup(self, *, resumed_at: Step | None = None) -> None:
        """Open what is needed.

        Args:
            resumed_at: the checkpoint that the run goes on from; what was logged after it is dropped.
        Raises:
            FileExistsError: another run's logs are there and this one is not its continuation.
            ValueError, TypeError, LookupError, AttributeError, NameError, ImportError: a wrong use. Both end the run
                before it trains; of anything else (a service that is away) an essential logger's only.
        """

    @abstractmethod
    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        """Log Python floats by metric name."""

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        """Log the user's hyperparameters, and what the run ran on (versions, engine, processes).

        Called when the run starts, resumed ones too, and again with all of them if some are added later.
        """

    def log_text(self, tag: str, text: str, *, step: Step, scope: Scope) -> None:
        """Log words for people to read."""

    def log_image(self, tag: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        """Log an image, (H, W), (H, W, 3) or (H, W, 4) uint8; figures come as such too."""

    def log_histogram(self, tag: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        """Log how values are distributed."""

    def log_pr_curve(self, tag: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        """Log precision against recall."""

    def log_artifact(self, tag: str, path: Path, *, step: Step, scope: Scope) -> None:
        """Log a file, or a folder with all that is in it, as it is now."""

    def log_end(self, error: BaseException | None) -> None:
        """Log how the run ended: by `error`, or well; :meth:`close` follows."""

    def flush(self) -> None:
        """Hand everything to the disk or the service; called at the end of every epoch."""

    def close(self) -> None:
        """Flush and let go; called once, also after an exception."""


def takes(loggers: Mapping[str, ILogger], method: str) -> bool:
    """Whether any of `loggers` does something in `method`: has one of its own.

    >>> takes({}, "log_image")
    False
    """
    return any(getattr(type(each), method) is not getattr(ILogger, method) for each in loggers.values())


class StepQueue:
    """Metrics of training steps on their way to the loggers: queued as tensors, copied to the host all at once."""

    def __init__(self) -> None:
        self._queue: list[tuple[Step, dict[str, Scalar]]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, step: Step, metrics: Mapping[str, Scalar]) -> None:
        """Queue () tensors or numbers as they are now: a tensor or an array may change in place; no host sync."""
        now: dict[str, Scalar] = {
            key: value.detach().clone() if isinstance(value, Tensor) else copy(value) for key, value in metrics.items()
        }
        self._queue.append((step, now))

    def take(self) -> list[tuple[Step, Metrics]]:
        """Empty the queue, as Python floats, none of them rounded; one copy from each device."""
        metrics = read_metrics_at_once(metrics for _, metrics in self._queue)
        taken = [(step, each) for (step, _), each in zip(self._queue, metrics, strict=True)]
        self._queue.clear()
        return taken
