"""Base class of loggers that send to a tracking service."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runnerkit.logger import Cell, Histogram, PRCurve, Scope, Step
from runnerkit.loggers.files.log_folder import FolderLogger
from runnerkit.loggers.services.ledger import Ledger

logger = logging.getLogger(__name__)


class ServiceLogger(FolderLogger):
    """Base class of loggers whose service identifies runs by an id.

    Names are ``valid/loss`` for the metrics of a loader and ``train/batch/loss`` for those of a training step. Images,
    texts, histograms, curves and tables follow the same scheme.

    Args:
        logdir: stores the run's id and progress, so that a resumed run continues the service's run and repeats nothing.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.
        log_checkpoint: send the best checkpoint of `logdir`, or the last if none is best, when the run ends.

    Attributes:
        run_id: the run's id at the service, once the logger is set up.
    """

    service: str  # name of the folder in the logdir

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        log_batch_metrics: bool = False,
        log_epoch_metrics: bool = True,
        log_checkpoint: bool = False,
    ) -> None:
        super().__init__(logdir, log_batch_metrics=log_batch_metrics, log_epoch_metrics=log_epoch_metrics)
        self.log_checkpoint = log_checkpoint
        self._ledger = Ledger(self.logdir / self.service)

    @property
    def run_id(self) -> str | None:
        return self._ledger.run_id

    @property
    def num_waiting(self) -> int:
        """Number of values that wait for the next :meth:`flush`; while there are any, nothing is recorded as sent."""
        return 0

    def setup(self, *, resumed_at: Step | None = None) -> None:
        """Open a run at the service, or reopen the earlier one if the run is resumed.

        Raises:
            ImportError: the service's package is not installed.
            FileExistsError: the logdir holds the logs of another run and this run does not resume it.
        """
        self._ledger = Ledger(self.logdir / self.service)
        self._ledger.open(is_resumed=resumed_at is not None)
        self._ledger.start(self.open_run(self._ledger.run_id))
        epoch, batch = self._ledger.furthest()
        if resumed_at is not None and (epoch, batch) > (resumed_at.epoch, resumed_at.batch):
            logger.warning(
                "%s: run %s already holds values up to epoch %d, step %d, and they cannot be deleted: values that this "
                "run logs again up to there are not sent",
                type(self).__name__, self.run_id, epoch, batch,
            )  # fmt: skip

    @abstractmethod
    def open_run(self, run_id: str | None) -> str:
        """Open the run with this id, or a new run if it is None; return the run's id."""

    @abstractmethod
    def send_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        """Send numbers under the names used at the service."""

    @abstractmethod
    def send_text(self, name: str, text: str, *, step: Step, scope: Scope) -> None:
        """Send a text."""

    @abstractmethod
    def send_image(self, name: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        """Send an image, (H, W), (H, W, 3) or (H, W, 4) uint8."""

    @abstractmethod
    def send_histogram(self, name: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        """Send the counts and edges of a histogram."""

    @abstractmethod
    def send_pr_curve(self, name: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        """Send a precision-recall curve."""

    @abstractmethod
    def send_table(self, name: str, table: Mapping[str, Sequence[Cell]], *, step: Step, scope: Scope) -> None:
        """Send a table by columns."""

    @abstractmethod
    def send_artifact(self, name: str, path: Path, *, kind: str) -> None:
        """Send a file or a folder; `kind` is "model" or "file"."""

    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        named = {_name(tag, step, scope): value for tag, value in scalars.items()}
        unsent = self._ledger.unsent(named, step=step)
        if unsent:
            self.send_scalars({name: named[name] for name in unsent}, step=step, scope=scope)
            self._note(unsent, step)

    def log_text(self, tag: str, text: str, *, step: Step, scope: Scope) -> None:
        self._send_once("text", self.send_text, tag, text, step=step, scope=scope)

    def log_image(self, tag: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        self._send_once("image", self.send_image, tag, image, step=step, scope=scope)

    def log_histogram(self, tag: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        self._send_once("histogram", self.send_histogram, tag, histogram, step=step, scope=scope)

    def log_pr_curve(self, tag: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        self._send_once("pr_curve", self.send_pr_curve, tag, curve, step=step, scope=scope)

    def log_table(self, tag: str, table: Mapping[str, Sequence[Cell]], *, step: Step, scope: Scope) -> None:
        self._send_once("table", self.send_table, tag, table, step=step, scope=scope)

    def log_artifact(self, tag: str, path: Path, *, step: Step, scope: Scope) -> None:
        unsent = self._ledger.unsent([f"artifact {tag}"], step=step)
        if unsent:
            self.send_artifact(tag, path, kind="file")
            self._note(unsent, step)

    def log_end(self, error: BaseException | None) -> None:
        if self.log_checkpoint:
            folder = self.logdir / "checkpoints"
            names = (folder / name for name in ("best.pth", "best", "last.pth", "last"))  # folders: sharded checkpoints
            for path in filter(Path.exists, names):
                self.send_artifact("checkpoint", path, kind="model")
                break

    def flush(self) -> None:
        self._ledger.write()

    def close(self) -> None:
        self._ledger.close()

    def _send_once(
        self, kind: str, send: Callable[..., None], tag: str, value: Any, *, step: Step, scope: Scope
    ) -> None:
        name = _name(tag, step, scope)
        unsent = self._ledger.unsent([f"{kind} {name}"], step=step)  # a table and its picture have one name
        if unsent:
            send(name, value, step=step, scope=scope)
            self._note(unsent, step)

    def _note(self, names: list[str], step: Step) -> None:
        self._ledger.note(names, step=step)
        if not self.num_waiting:
            self._ledger.write()


def _name(tag: str, step: Step, scope: Scope) -> str:
    loader = f"{step.loader}/" if step.loader else ""  # empty before the first loader
    return f"{loader}batch/{tag}" if scope == "batch" else f"{loader}{tag}"
