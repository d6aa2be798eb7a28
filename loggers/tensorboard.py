"""Metrics as TensorBoard events: one run for each loader, the same tags in each, so that their curves overlay."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from runnerkit.logger import ILogger, Scope, Step
from runnerkit.loggers.folder import claim_folder

if TYPE_CHECKING:
    from runnerkit.loggers.event_files import EventFiles


class TensorboardLogger(ILogger):
    """Write events to ``tensorboard/<loader>/``: tag ``loss`` for a whole loader, ``batch/loss`` for a training step.

    Args:
        logdir: made when the run starts.
        log_batch_metrics: log single training steps too.
        log_epoch_metrics: log whole loaders.
        x_axis: of whole loaders. By "epoch", TensorBoard shows the last evaluation of each epoch; by "step"
            (training steps so far), every one.

    >>> import tempfile
    >>> logger = TensorboardLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> logger.log_scalars({"loss": 0.5}, step=Step("train", "valid", epoch=1, batch=100), scope="loader")
    >>> logger.close()
    >>> [run.name for run in (logger.logdir / "tensorboard").iterdir()]
    ['valid']
    """

    logdir: Path

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        log_batch_metrics: bool = False,
        log_epoch_metrics: bool = True,
        x_axis: Literal["epoch", "step"] = "epoch",
    ) -> None:
        if x_axis not in ("epoch", "step"):
            raise ValueError(f'x_axis must be "epoch" or "step", got {x_axis!r}')
        self.logdir = Path(logdir).absolute()  # the run may change its working directory
        self.log_batch_metrics = log_batch_metrics
        self.log_epoch_metrics = log_epoch_metrics
        self.x_axis = x_axis
        self._folder = self.logdir / "tensorboard"
        self._runs: dict[str, EventFiles] = {}

    def setup(self, *, resumed_at: Step | None = None) -> None:
        """Open what is needed.

        Raises:
            ImportError: TensorBoard is not installed.
            FileExistsError: another run's logs are there and this one is not its continuation.
        """
        try:
            import runnerkit.loggers.event_files  # noqa: F401  # refuses now rather than after the first epoch
        except ImportError as error:
            raise ImportError("TensorboardLogger needs TensorBoard: pip install runnerkit[tensorboard]") from error
        earlier_logs = sorted(self._folder.rglob("*tfevents*"))
        claim_folder(self._folder, earlier_logs=earlier_logs, is_resumed=resumed_at is not None)
        if resumed_at is not None:
            for folder in {path.parent for path in earlier_logs}:
                self._run(folder.relative_to(self._folder).as_posix()).drop_after(resumed_at)

    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        if scope == "batch":
            tagged = {f"batch/{name}": value for name, value in scalars.items()}
            self._run(step.loader).add_scalars(tagged, step=step, x=step.batch)
        else:
            self._run(step.loader).add_scalars(scalars, step=step, x=self._x(step))

    def log_image(self, name: str, image: np.ndarray, *, step: Step) -> None:
        self._run(step.loader).add_image(name, image, step=step, x=self._x(step))

    def flush(self) -> None:
        for run in self._runs.values():
            run.flush()

    def close(self) -> None:
        for run in self._runs.values():
            run.close()
        self._runs.clear()

    def _run(self, loader: str) -> EventFiles:
        if loader not in self._runs:
            from runnerkit.loggers.event_files import EventFiles

            self._runs[loader] = EventFiles(self._folder / loader)
        return self._runs[loader]

    def _x(self, step: Step) -> int:
        return step.epoch if self.x_axis == "epoch" else step.batch
