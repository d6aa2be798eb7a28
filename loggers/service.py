"""What loggers of services have in common: a run's id and progress kept in the logdir, names, checkpoints sent."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from runnerkit.logger import Histogram, PRCurve, Scope, Step
from runnerkit.loggers.folder import FolderLogger
from runnerkit.loggers.ledger import Ledger

logger = logging.getLogger(__name__)


class ServiceLogger(FolderLogger):
    """Base of loggers whose service keeps runs by an id.

    A loader's metrics are called ``valid/loss``, those of single training steps ``train/batch/loss``, and pictures,
    texts and the like alike.

    Args:
        logdir: for the notes by which a resumed run goes on with the same run of the service, and repeats nothing.
        log_batch_metrics: log single training steps too.
        log_epoch_metrics: log whole loaders.
        log_checkpoint: send the best checkpoint of `logdir`, else the last, when the run ends.

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
        """Numbers that are to be sent by the next :meth:`flush` at the latest; until then nothing counts as sent."""
        return 0

    def setup(self, *, resumed_at: Step | None = None) -> None:
        """Open the service's run; the one that was there before if the run is resumed.

        Raises:
            ImportError: the service's package is not installed.
            FileExistsError: another run's notes are there and this one is not its continuation.
        """
        self._ledger = Ledger(self.logdir / self.service)
        self._ledger.open(is_resumed=resumed_at is not None)
        self._ledger.start(self.open_run(self._ledger.run_id))
        epoch, batch = self._ledger.furthest()
        if resumed_at is not None and (epoch, batch) > (resumed_at.epoch, resumed_at.batch):
            logger.warning(
                "%s has run %s until epoch %d, step %d, and forgets nothing: what is logged again up to there is not "
                "sent again",
                type(self).__name__, self.run_id, epoch, batch,
            )  # fmt: skip

    @abstractmethod
    def open_run(self, run_id: str | None) -> str:
        """Open the run of that id, or a new one; return its id."""

    @abstractmethod
    def send_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        """Send numbers by the service's names."""

    @abstractmethod
    def send_text(self, name: str, text: str, *, step: Step, scope: Scope) -> None:
        """Send words."""

    @abstractmethod
    def send_image(self, name: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        """Send a picture, (H, W), (H, W, 3) or (H, W, 4) uint8."""

    @abstractmethod
    def send_histogram(self, name: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        """Send counts and edges."""

    @abstractmethod
    def send_pr_curve(self, name: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        """Send precision by recall."""

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
        self._send_once(self.send_text, tag, text, step=step, scope=scope)

    def log_image(self, tag: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        self._send_once(self.send_image, tag, image, step=step, scope=scope)

    def log_histogram(self, tag: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        self._send_once(self.send_histogram, tag, histogram, step=step, scope=scope)

    def log_pr_curve(self, tag: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        self._send_once(self.send_pr_curve, tag, curve, step=step, scope=scope)

    def log_artifact(self, tag: str, path: Path, *, step: Step, scope: Scope) -> None:
        unsent = self._ledger.unsent([f"artifact {tag}"], step=step)
        if unsent:
            self.send_artifact(tag, path, kind="file")
            self._note(unsent, step)

    def log_end(self, error: BaseException | None) -> None:
        if self.log_checkpoint:
            folder = self.logdir / "checkpoints"
            names = (folder / name for name in ("best.pth", "best", "last.pth", "last"))  # folders hold shards
            for path in filter(Path.exists, names):
                self.send_artifact("checkpoint", path, kind="model")
                break

    def flush(self) -> None:
        self._ledger.write()

    def close(self) -> None:
        self._ledger.close()

    def _send_once(self, send: Callable[..., None], tag: str, value: Any, *, step: Step, scope: Scope) -> None:
        unsent = self._ledger.unsent([_name(tag, step, scope)], step=step)
        if unsent:
            send(unsent[0], value, step=step, scope=scope)
            self._note(unsent, step)

    def _note(self, names: list[str], step: Step) -> None:
        self._ledger.note(names, step=step)
        if not self.num_waiting:
            self._ledger.write()


def _name(tag: str, step: Step, scope: Scope) -> str:
    loader = f"{step.loader}/" if step.loader else ""  # none: logged before the first loader
    return f"{loader}batch/{tag}" if scope == "batch" else f"{loader}{tag}"
