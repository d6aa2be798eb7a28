"""The contract of a logger: numbers come in, files or a service take them; it has never heard of a runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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


class ILogger(ABC):
    """Base of loggers. Only rank zero has any, so none of them tests the rank.

    The constructor stores and validates; files and sockets open in :meth:`setup`.

    Attributes:
        logdir: where it writes files, which one run at a time may; None writes none.
        log_batch_metrics: wants the numbers of single training steps (every ``log_every`` of them).
        log_epoch_metrics: wants the numbers of whole loaders.
    """

    logdir: Path | None = None
    log_batch_metrics: bool = False
    log_epoch_metrics: bool = True

    def setup(self, *, resumed_at: Step | None = None) -> None:
        """Open what is needed.

        Args:
            resumed_at: the checkpoint that the run goes on from; what was logged after it is dropped.
        Raises:
            FileExistsError: another run's logs are there and this one is not its continuation.
        """

    @abstractmethod
    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        """Log Python floats by metric name."""

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        """Log the user's hyperparameters, and what the run ran on (versions, engine, processes)."""

    def log_text(self, text: str, *, step: Step) -> None:
        """Log a sentence for people to read."""

    def log_image(self, name: str, image: np.ndarray, *, step: Step) -> None:
        """Log an image, (H, W) or (H, W, 3) uint8."""

    def log_artifact(self, name: str, path: Path) -> None:
        """Log a file."""

    def flush(self) -> None:
        """Hand everything to the disk or the service; called at the end of every epoch."""

    def close(self) -> None:
        """Flush and let go; called once, also after an exception."""


class StepQueue:
    """Metrics of training steps on their way to the loggers: queued as tensors, copied to the host all at once."""

    def __init__(self) -> None:
        self._queue: list[tuple[Step, dict[str, Scalar]]] = []

    def put(self, step: Step, metrics: Mapping[str, Scalar]) -> None:
        """Queue () tensors or numbers as they are now: a tensor may change in place; no host sync."""
        now: dict[str, Scalar] = {
            key: value.detach().clone() if isinstance(value, Tensor) else value for key, value in metrics.items()
        }
        self._queue.append((step, now))

    def take(self) -> list[tuple[Step, Metrics]]:
        """Empty the queue, as Python floats, none of them rounded; one copy from each device."""
        metrics = read_metrics_at_once(metrics for _, metrics in self._queue)
        taken = [(step, each) for (step, _), each in zip(self._queue, metrics, strict=True)]
        self._queue.clear()
        return taken
