"""The interface of loggers, which write metrics and media to files or services, independently of the runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from torch import Tensor

from runnerkit.support.arguments import explain_renamed
from runnerkit.support.host_copy import read_metrics_at_once
from runnerkit.support.members import overrides
from runnerkit.types import Metrics, Scalar

__all__ = ["ILogger"]

Scope = Literal["batch", "loader"]  # one training step, or one pass over a loader
Cell = str | int | float | bool  # of a table


@dataclass(frozen=True)
class Step:
    """The position in a run at which a value was measured.

    Attributes:
        stage: name of the stage, "train" by default.
        loader: key of the loader, such as "train" or "valid".
        epoch: 1, 2, ... over all stages.
        batch: number of training steps so far, over all stages.
        unended: of the step that a run resumes at, the keys of loaders that had not ended then.
    """

    stage: str
    loader: str
    epoch: int
    batch: int
    unended: frozenset[str] = field(default=frozenset(), repr=False, compare=False)

    def includes(self, epoch: int, batch: int, *, loader: str, scope: str) -> bool:
        """Return whether an entry had been logged when the run, which resumes at this step, was saved."""
        if (epoch, batch) == (self.epoch, self.batch):
            return scope != "loader" or loader not in self.unended
        return epoch <= self.epoch and batch <= self.batch


class Histogram(NamedTuple):
    """A distribution of values.

    Attributes:
        counts: (B,) int64, of the values in [edges[i], edges[i + 1]); the last bin includes its right edge.
        edges: (B + 1,) float64, ascending.
    """

    counts: np.ndarray
    edges: np.ndarray


class PRCurve(NamedTuple):
    """The results of a binary classifier at each threshold; scores >= threshold are classified as positive.

    Attributes:
        thresholds: (T,) float64, ascending from 0 to 1.
        true_positives, false_positives, true_negatives, false_negatives: (T,) int64 counts of samples.
        precision, recall: (T,) float64; 0 where no sample is classified as positive, or none is positive.
    """

    thresholds: np.ndarray
    true_positives: np.ndarray
    false_positives: np.ndarray
    true_negatives: np.ndarray
    false_negatives: np.ndarray
    precision: np.ndarray
    recall: np.ndarray


class ILogger(ABC):
    """The base class of loggers. Loggers exist on rank zero only, so they do not check the rank.

    The constructor stores and validates; files and sockets open in :meth:`setup`. Subclasses must implement
    `log_scalars` and may override the other methods. An exception outside of `setup` ends the run if the logger is
    essential; otherwise it causes a warning, and the run continues without this logger.

    Attributes:
        is_essential: True if the run must not continue without this logger. The library's file loggers are essential,
            since a resumed run guarantees identical files; services, which may be unavailable, are not. Set it on the
            object to change this.
        logdir: folder of its files, which only one run at a time may use; None if it does not write files.
        log_batch_metrics: receive the metrics of single training steps (every ``log_every`` steps).
        log_epoch_metrics: receive the metrics of whole loaders.
        log_throughput: with the metrics of single training steps, also receive "samples/s" and, if batches have a
            `batch_weight` such as their number of tokens, "tokens/s", since the step logged before. Files leave them
            out: those of a resumed run would differ.
    """

    is_essential: bool = False
    logdir: Path | None = None
    log_batch_metrics: bool = False
    log_epoch_metrics: bool = True
    log_throughput: bool = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        explain_renamed(cls)

    def setup(self, *, resumed_at: Step | None = None) -> None:
        """Open files and connections.

        Args:
            resumed_at: position of the checkpoint that the run resumes from; later log entries are dropped.
        Raises:
            FileExistsError: the folder has logs of another run, and this run does not continue it.
            ValueError, TypeError, LookupError, AttributeError, NameError, ImportError: incorrect usage. These errors
                and FileExistsError end the run before training; other errors (for example, a service is unavailable)
                end it only if the logger is essential.
        """

    @abstractmethod
    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        """Log Python floats by metric name."""

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        """Log the user's hyperparameters and the environment (versions, commit, engine, processes, settings).

        Called at the start of a run, also a resumed one, and again with all hyperparameters if some are added later.
        """

    def log_text(self, tag: str, text: str, *, step: Step, scope: Scope) -> None:
        """Log human-readable text."""

    def log_notice(self, text: str) -> None:
        """Show one line about the run to a person, such as that it resumes; files of a resumed run must not have it."""

    def log_image(self, tag: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        """Log an image, (H, W), (H, W, 3) or (H, W, 4) uint8; figures are converted to images first."""

    def log_histogram(self, tag: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        """Log a histogram."""

    def log_pr_curve(self, tag: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        """Log a precision-recall curve."""

    def log_table(self, tag: str, table: Mapping[str, Sequence[Cell]], *, step: Step, scope: Scope) -> None:
        """Log a table, a list of cells for each column; all lists have the same length."""

    def log_artifact(self, tag: str, path: Path, *, step: Step, scope: Scope) -> None:
        """Log the current content of a file or folder."""

    def log_end(self, error: BaseException | None) -> None:
        """Log the end of the run, with `error` or None if it succeeded; :meth:`close` follows."""

    def flush(self) -> None:
        """Write everything to the disk or the service; called after each pass over a loader."""

    def close(self) -> None:
        """Flush and release all resources; called once, also after an exception."""


def takes(loggers: Mapping[str, ILogger], method: str) -> bool:
    """Check if any of `loggers` overrides `method`.

    >>> takes({}, "log_image")
    False
    """
    return any(overrides(each, ILogger, method) for each in loggers.values())


class StepQueue:
    """A queue of training-step metrics for the loggers: stored as tensors and copied to the host together."""

    def __init__(self) -> None:
        self._queue: list[tuple[Step, dict[str, Scalar]]] = []

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, step: Step, metrics: Mapping[str, Scalar]) -> None:
        """Queue copies of () tensors or numbers, which may change in place later, without host synchronization."""
        now: dict[str, Scalar] = {
            key: value.detach().clone() if isinstance(value, Tensor) else copy(value) for key, value in metrics.items()
        }
        self._queue.append((step, now))

    def take(self) -> list[tuple[Step, Metrics]]:
        """Empty the queue and return its metrics as unrounded Python floats, with one copy per device."""
        metrics = read_metrics_at_once(metrics for _, metrics in self._queue)
        taken = [(step, each) for (step, _), each in zip(self._queue, metrics, strict=True)]
        self._queue.clear()
        return taken
