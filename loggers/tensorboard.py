"""Logger that writes TensorBoard events, one TensorBoard run per loader so that their curves overlay."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from runnerkit.logger import Histogram, PRCurve, Scope, Step
from runnerkit.loggers.files.log_folder import FolderLogger, claim_folder
from runnerkit.storage.atomic_file import check_folder
from runnerkit.storage.links import refuse_links

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]  # untyped

    from runnerkit.loggers.files.event_files import EventFiles

__all__ = ["TensorboardLogger"]


def has_tensorboard() -> bool:
    """Return whether TensorBoard is installed, without importing it, which takes time."""
    try:
        return find_spec("tensorboard") is not None
    except (ImportError, ValueError):  # an import hook forbids it, or a stand-in lacks a spec
        return False


class TensorboardLogger(FolderLogger):
    """Logger that writes events to ``tensorboard/<loader>/``.

    The tag is ``loss`` for a pass over a loader and ``batch/loss`` for a training step. Images, texts, histograms and
    PR curves are supported too: their x is the training step if they were logged during one, else that of `x_axis`. A
    run with hyperparameters has a row in the HPARAMS tab.

    Args:
        logdir: created when the run starts.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.
        x_axis: x of the metrics of a pass over a loader. With "epoch", TensorBoard shows the last evaluation of each
            epoch; with "step" (training steps so far), every evaluation.

    >>> import tempfile
    >>> logger = TensorboardLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> logger.log_scalars({"loss": 0.5}, step=Step("train", "valid", epoch=1, batch=100), scope="loader")
    >>> logger.close()
    >>> [run.name for run in (logger.logdir / "tensorboard").iterdir()]
    ['valid']
    """

    is_essential = True

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        log_batch_metrics: bool = False,
        log_epoch_metrics: bool = True,
        x_axis: Literal["epoch", "step"] = "epoch",
    ) -> None:
        if x_axis not in ("epoch", "step"):
            raise ValueError(f'{type(self).__name__}: x_axis must be "epoch" or "step", got {x_axis!r}')
        super().__init__(logdir, log_batch_metrics=log_batch_metrics, log_epoch_metrics=log_epoch_metrics)
        self.x_axis = x_axis
        self._folder = self.logdir / "tensorboard"
        self._runs: dict[str, EventFiles] = {}
        self._hparams: dict[str, Any] = {}
        self._start_s = 0.0

    def setup(self, *, resumed_at: Step | None = None) -> None:
        """Create the folder, and drop the events after the checkpoint if the run is resumed.

        Raises:
            ImportError: TensorBoard is not installed.
            FileExistsError: the logdir holds the logs of another run and this run does not resume it.
        """
        try:
            import runnerkit.loggers.files.event_files  # noqa: F401  # fails now, not after the first epoch
        except ImportError as error:
            raise ImportError("TensorboardLogger needs TensorBoard: pip install runnerkit[tensorboard]") from error
        earlier_logs = sorted(self._folder.rglob("*tfevents*"))
        claim_folder(self._folder, logdir=self.logdir, earlier_logs=earlier_logs, is_resumed=resumed_at is not None)
        self._start_s = time.time()
        if resumed_at is not None:
            for folder in {path.parent for path in earlier_logs}:
                loader = folder.relative_to(self._folder).as_posix()
                self._run(loader).drop_after(resumed_at, loader=loader)

    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        if scope == "batch":
            tagged = {f"batch/{name}": value for name, value in scalars.items()}
            self._run(step.loader).add_scalars(tagged, step=step, scope=scope, x=step.batch)
        else:
            self._run(step.loader).add_scalars(scalars, step=step, scope=scope, x=self._x(step, scope))

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        """Write the hyperparameters for the HPARAMS tab; values other than numbers and bools become strings."""
        from runnerkit.loggers.files import hparams_events

        self._hparams = dict(hparams)
        if hparams:
            hparams_events.write_hparams(self._folder, hparams, start_s=self._start_s)

    def log_text(self, tag: str, text: str, *, step: Step, scope: Scope) -> None:
        from runnerkit.loggers.files.media_events import text_summary

        self._add(text_summary(tag, text), step, scope)

    def log_image(self, tag: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        from runnerkit.loggers.files.media_events import image_summary

        self._add(image_summary(tag, image), step, scope)

    def log_histogram(self, tag: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        from runnerkit.loggers.files.media_events import histogram_summary

        self._add(histogram_summary(tag, histogram), step, scope)

    def log_pr_curve(self, tag: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        from runnerkit.loggers.files.media_events import pr_curve_summary

        self._add(pr_curve_summary(tag, curve), step, scope)

    def log_end(self, error: BaseException | None) -> None:
        is_over = error is None or isinstance(error, Exception)  # a stopped run may be resumed
        if self._hparams and is_over and self._folder.is_dir():
            from runnerkit.loggers.files import hparams_events

            hparams_events.write_hparams(self._folder, self._hparams, start_s=self._start_s, failed=error is not None)

    def flush(self) -> None:
        for run in self._runs.values():
            run.flush()

    def close(self) -> None:
        for run in self._runs.values():
            run.close()
        self._runs.clear()

    def _add(self, summary: Summary, step: Step, scope: Scope) -> None:
        self._run(step.loader).add(summary, step=step, scope=scope, x=self._x(step, scope))

    def _run(self, loader: str) -> EventFiles:
        check_folder(self._folder)
        loader = loader or "."  # before the first loader: the parent of the loaders' folders
        if loader not in self._runs:
            from runnerkit.loggers.files.event_files import EventFiles

            refuse_links(self._folder / loader, below=self.logdir)
            self._runs[loader] = EventFiles(self._folder / loader)
        return self._runs[loader]

    def _x(self, step: Step, scope: Scope) -> int:
        return step.epoch if scope == "loader" and self.x_axis == "epoch" else step.batch
