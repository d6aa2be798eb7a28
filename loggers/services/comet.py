"""Logger for Comet, online or to an offline archive."""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runnerkit.logger import Cell, Histogram, PRCurve, Scope, Step
from runnerkit.loggers.services.service import ServiceLogger
from runnerkit.support.arguments import check_strings
from runnerkit.support.plain_values import flat, plain

__all__ = ["CometLogger"]

_SWITCH = "COMET_DISABLE_AUTO_LOGGING"


class CometLogger(ServiceLogger):
    """Logger that writes to a Comet experiment; a resumed training continues the same experiment.

    Each metric carries its epoch and its step (training steps so far), so Comet can plot it against either.
    Hyperparameters become parameters with dotted names, and the environment a JSON asset. Histograms use Comet's bins,
    each 10 % wider than the one before. An exception that ends the run is logged as ``error``, under Other.

    If an experiment is already active, the logger uses it and does not end it.

    Args:
        logdir: stores the experiment's key and the archives, in ``comet/``.
        project_name: None uses Comet's default (COMET_PROJECT_NAME).
        workspace: workspace of the project; None uses Comet's default.
        online: False writes an archive when the run ends; ``comet upload`` sends it.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.
        log_checkpoint: send the best checkpoint of `logdir`, or the last if none is best, when the run ends.
        config: passed to ``comet_ml.ExperimentConfig``: name, tags, ``log_code=False``, ...

    >>> CometLogger("logs", project_name="digits", online=False, tags=["first"]).config
    {'tags': ['first']}
    """

    service = "comet"

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        project_name: str | None = None,
        workspace: str | None = None,
        online: bool = True,
        log_batch_metrics: bool = False,
        log_epoch_metrics: bool = True,
        log_checkpoint: bool = False,
        **config: Any,
    ) -> None:
        super().__init__(
            logdir,
            log_batch_metrics=log_batch_metrics,
            log_epoch_metrics=log_epoch_metrics,
            log_checkpoint=log_checkpoint,
        )
        check_strings(self, or_none=True, project_name=project_name, workspace=workspace)
        own = sorted({"experiment_key", "mode", "offline_directory"} & config.keys())
        if own:
            raise ValueError(f"CometLogger sets {', '.join(own)} itself: pass logdir and train(resume=...) instead")
        self.project_name = project_name
        self.workspace = workspace
        self.online = online
        self.config = config
        self._run: Any = None
        self._is_ours = False

    @property
    def num_waiting(self) -> int:
        # `close` writes the archive, not `flush`: a run that is killed before has sent nothing.
        return 0 if self.online else self._ledger.num_sent

    def open_run(self, run_id: str | None) -> str:
        with _process_left_alone():
            try:
                import comet_ml
            except ImportError as error:
                raise ImportError("CometLogger needs Comet: pip install runnerkit[comet]") from error
            running = comet_ml.get_running_experiment()  # the latest one, which may have ended
            self._is_ours = running is None or not running.alive
            self._run = self._start(run_id or secrets.token_hex(16)) if self._is_ours else running
        if not self._run.alive:
            raise RuntimeError(
                "Comet started no live experiment: read its message above and check COMET_AUTO_LOG_DISABLE"
            )
        return str(self._run.get_key())

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        self._run.log_parameters(dict(flat(plain(hparams))))
        self._run.log_asset_data(plain(environment), name="environment.json", overwrite=True)

    def send_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        self._run.log_metrics(dict(scalars), step=step.batch, epoch=step.epoch)

    def send_text(self, name: str, text: str, *, step: Step, scope: Scope) -> None:
        self._at(step).log_text(text, metadata={"name": name})

    def send_image(self, name: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        from PIL import Image

        # Comet would rescale an array so that its darkest and brightest values become black and white.
        self._at(step).log_image(Image.fromarray(image), name=name, metadata={"epoch": step.epoch})

    def send_histogram(self, name: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        import comet_ml

        middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2
        counts = comet_ml.Histogram()
        counts.add(middles, counts=histogram.counts)
        self._at(step).log_histogram_3d(counts, name=name)

    def send_pr_curve(self, name: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        self._at(step).log_curve(name, x=curve.recall.tolist(), y=curve.precision.tolist())

    def send_table(self, name: str, table: Mapping[str, Sequence[Cell]], *, step: Step, scope: Scope) -> None:
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        self._at(step).log_table(f"{name}.csv", tabular_data=rows, headers=list(table))

    def send_artifact(self, name: str, path: Path, *, kind: str) -> None:
        if kind == "model":
            self._run.log_model(name, str(path))
            return
        files = sorted(filter(Path.is_file, path.rglob("*"))) if path.is_dir() else [path]
        folder = path if path.is_dir() else path.parent
        for file in files:
            self._run.log_asset(str(file), file_name=f"{name}/{file.relative_to(folder).as_posix()}")

    def log_end(self, error: BaseException | None) -> None:
        super().log_end(error)
        if error is not None:
            self._run.log_other("error", repr(error))

    def flush(self) -> None:
        if self.online:
            super().flush()

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None and self._is_ours:
            run.end()
        self._ledger.write()
        super().close()

    def _start(self, key: str) -> Any:
        import comet_ml

        # If the script lets Comet patch torch, every value that runnerkit logs would appear twice.
        config = {"auto_metric_logging": False, "auto_param_logging": False, **self.config}
        return comet_ml.start(
            workspace=self.workspace,
            project_name=self.project_name,
            experiment_key=key,
            mode="get_or_create",  # a run that was killed before it wrote its archive left no experiment
            online=self.online,
            experiment_config=comet_ml.ExperimentConfig(offline_directory=str(self.logdir / self.service), **config),
        )

    def _at(self, step: Step) -> Any:
        """Set the experiment's current epoch and step; return the experiment."""
        self._run.set_epoch(step.epoch)
        self._run.set_step(step.batch)
        return self._run


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """Undo the changes that Comet's import and start make to the process, unless the script imported Comet before."""
    hook, state, before = sys.excepthook, random.getstate(), os.environ.get(_SWITCH)
    # Without it, Comet hooks all later imports to log scikit-learn and others, and warns that torch is imported.
    os.environ[_SWITCH] = "1"
    # Comet draws archive names from Python's generator: with a fixed seed, a resumed run would overwrite the archive.
    random.seed()
    try:
        yield
    finally:
        sys.excepthook = hook  # Comet's reports uncaught errors; log_end already receives those that end the run
        random.setstate(state)
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
