"""Metrics, pictures and files to Comet, or to an archive that is sent later."""

from __future__ import annotations

import os
import random
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runnerkit.arguments import check_strings
from runnerkit.logger import Histogram, PRCurve, Scope, Step
from runnerkit.loggers.service import ServiceLogger
from runnerkit.plain_values import flat, plain

_SWITCH = "COMET_DISABLE_AUTO_LOGGING"


class CometLogger(ServiceLogger):
    """Log to an experiment of Comet, which a resumed training goes on with.

    Each metric has its epoch and its step (training steps so far): the page draws it by either. Hyperparameters are
    parameters, by names with dots; the environment is a JSON asset. Histograms are in Comet's bins, each a tenth wider
    than the one before. What ended the run too early is its ``error``, under Other.

    An experiment that the script has begun itself is used, and left open.

    Args:
        logdir: keeps the experiment's key and the archives, in ``comet/``.
        project_name: None is Comet's own choice (COMET_PROJECT_NAME), as is `workspace`.
        workspace: that has the project.
        online: False writes an archive when the run ends, which ``comet upload`` sends.
        log_batch_metrics: log single training steps too.
        log_epoch_metrics: log whole loaders.
        log_checkpoint: send the best checkpoint of `logdir`, else the last, when the run ends.
        config: handed to ``comet_ml.ExperimentConfig``: name, tags, ``log_code=False``, ...

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
            raise ValueError(f"CometLogger sets {', '.join(own)} itself, by logdir and train(resume=...)")
        self.project_name = project_name
        self.workspace = workspace
        self.online = online
        self.config = config
        self._run: Any = None
        self._is_ours = False

    @property
    def num_waiting(self) -> int:
        # An archive is written by close, not by flush: a run that is killed before has sent nothing.
        return 0 if self.online else self._ledger.num_sent

    def open_run(self, run_id: str | None) -> str:
        with _process_left_alone():
            try:
                import comet_ml
            except ImportError as error:
                raise ImportError("CometLogger needs Comet: pip install runnerkit[comet]") from error
            running = comet_ml.get_running_experiment()  # the last one, which may have ended
            self._is_ours = running is None or not running.alive
            self._run = self._start(run_id or secrets.token_hex(16)) if self._is_ours else running
        if not self._run.alive:
            raise RuntimeError("Comet logs nothing: see its message above, and whether COMET_AUTO_LOG_DISABLE is set")
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

        # An array's darkest and brightest value would become black and white.
        self._at(step).log_image(Image.fromarray(image), name=name, metadata={"epoch": step.epoch})

    def send_histogram(self, name: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        import comet_ml

        middles = (histogram.edges[:-1] + histogram.edges[1:]) / 2
        counts = comet_ml.Histogram()
        counts.add(middles, counts=histogram.counts)
        self._at(step).log_histogram_3d(counts, name=name)

    def send_pr_curve(self, name: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        self._at(step).log_curve(name, x=curve.recall.tolist(), y=curve.precision.tolist())

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

        # Where the script has Comet patch torch: what runnerkit logs would be there twice.
        config = {"auto_metric_logging": False, "auto_param_logging": False, **self.config}
        return comet_ml.start(
            workspace=self.workspace,
            project_name=self.project_name,
            experiment_key=key,
            mode="get_or_create",  # the first part of a run may have been killed before it wrote its archive
            online=self.online,
            experiment_config=comet_ml.ExperimentConfig(offline_directory=str(self.logdir / self.service), **config),
        )

    def _at(self, step: Step) -> Any:
        """Return the experiment, where what is logged next has this place."""
        self._run.set_epoch(step.epoch)
        self._run.set_step(step.batch)
        return self._run


@contextmanager
def _process_left_alone() -> Iterator[None]:
    """Undo what the import and the start of Comet do to the process, unless the script has imported it before."""
    hook, state, before = sys.excepthook, random.getstate(), os.environ.get(_SWITCH)
    # Else it hooks all later imports, to log what scikit-learn and others do, and warns that torch is there already.
    os.environ[_SWITCH] = "1"
    # It draws the names of archives from Python's random numbers: seeded ones would have each part overwrite the last.
    random.seed()
    try:
        yield
    finally:
        sys.excepthook = hook  # reports errors that nobody catches: log_end is told of those that end the run
        random.setstate(state)
        if before is None:
            del os.environ[_SWITCH]
        else:
            os.environ[_SWITCH] = before
