"""Logger for an MLflow tracking server or database."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from runnerkit.logger import Cell, Histogram, PRCurve, Scope, Step
from runnerkit.loggers.services.service import ServiceLogger
from runnerkit.support.arguments import check_mappings, check_strings
from runnerkit.support.plain_values import flat, plain

__all__ = ["MLflowLogger"]

logger = logging.getLogger(__name__)

# Numbers are sent in batches at this interval: a call to SQLite or a server takes about 30 ms, whatever its size.
_EVERY_S = 5.0
_NUM_METRICS, _NUM_PARAMS = 1000, 100  # MLflow's limits for one call


class MLflowLogger(ServiceLogger):
    """Logger that writes to an MLflow run; a resumed training continues the same run.

    Hyperparameters become parameters with dotted names. The environment, histograms and PR curves become JSON
    artifacts. MLflow does not let a parameter change: one that differs after a resume keeps its old value in MLflow,
    and the logger warns.

    Args:
        logdir: stores the run's id, in ``mlflow/``.
        experiment: created if it does not exist.
        run_name: None lets MLflow choose a name.
        tracking_uri: a server, or a database such as ``sqlite:///runs.db``; None uses MLflow's default
            (MLFLOW_TRACKING_URI). MLflow 3.17 refuses folders, unless MLFLOW_ALLOW_FILE_STORE=true.
        tags: tags of the run.
        x_axis: x of the metrics of a pass over a loader: "epoch", or "step" (training steps so far). The x of
            the metrics of a training step is always the step.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.
        log_checkpoint: send the best checkpoint of `logdir`, or the last if none is best, when the run ends.

    >>> MLflowLogger("logs", experiment="digits", tracking_uri="sqlite:///runs.db").run_id is None
    True
    """

    service = "mlflow"

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        experiment: str = "Default",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, str] | None = None,
        x_axis: Literal["epoch", "step"] = "epoch",
        log_batch_metrics: bool = False,
        log_epoch_metrics: bool = True,
        log_checkpoint: bool = False,
    ) -> None:
        if x_axis not in ("epoch", "step"):
            raise ValueError(f'{type(self).__name__}: x_axis must be "epoch" or "step", got {x_axis!r}')
        super().__init__(
            logdir,
            log_batch_metrics=log_batch_metrics,
            log_epoch_metrics=log_epoch_metrics,
            log_checkpoint=log_checkpoint,
        )
        check_strings(self, experiment=experiment)
        check_strings(self, or_none=True, run_name=run_name, tracking_uri=tracking_uri)
        check_mappings(self, tags=tags)
        self.experiment = experiment
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self.tags = dict(tags or {})
        self.x_axis = x_axis
        self._client: Any = None
        self._waiting: list[Any] = []
        self._sent_at = 0.0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def open_run(self, run_id: str | None) -> str:
        try:
            from mlflow import MlflowClient
        except ImportError as error:
            raise ImportError("MLflowLogger needs MLflow: pip install runnerkit[mlflow]") from error
        self._client = MlflowClient(tracking_uri=self.tracking_uri)
        self._waiting, self._sent_at = [], time.monotonic()
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        found = self._client.get_experiment_by_name(self.experiment)
        experiment_id = found.experiment_id if found is not None else self._client.create_experiment(self.experiment)
        run = self._client.create_run(experiment_id, tags=self.tags, run_name=self.run_name)
        return str(run.info.run_id)

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        known = self._client.get_run(self.run_id).data.params
        values = {_key(name): str(value) for name, value in flat(plain(hparams))}
        changed = [name for name, value in values.items() if known.get(name, value) != value]
        if changed:
            logger.warning("MLflow parameters cannot change; these keep their old values: %s", ", ".join(changed))
        new = [Param(name, value) for name, value in values.items() if name not in known]
        for start in range(0, len(new), _NUM_PARAMS):
            self._client.log_batch(self.run_id, params=new[start : start + _NUM_PARAMS])
        self._client.log_dict(self.run_id, plain(environment), "environment.json")

    def send_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        from mlflow.entities import Metric

        now_ms, x = int(time.time() * 1000), self._x(step, scope)
        self._waiting += [Metric(_key(name), value, now_ms, x) for name, value in scalars.items()]
        if time.monotonic() - self._sent_at >= _EVERY_S:
            self._send_waiting()

    def send_text(self, name: str, text: str, *, step: Step, scope: Scope) -> None:
        self._client.log_text(self.run_id, text, f"texts/{_key(name)}/{self._x(step, scope)}.txt")

    def send_image(self, name: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        self._client.log_image(self.run_id, image, key=_key(name), step=self._x(step, scope))

    def send_histogram(self, name: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        self._send_arrays(f"histograms/{_key(name)}/{self._x(step, scope)}.json", histogram)

    def send_pr_curve(self, name: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        self._send_arrays(f"pr_curves/{_key(name)}/{self._x(step, scope)}.json", curve)

    def send_table(self, name: str, table: Mapping[str, Sequence[Cell]], *, step: Step, scope: Scope) -> None:
        file = f"tables/{_key(name)}/{self._x(step, scope)}.json"
        rows = [list(row) for row in zip(*table.values(), strict=True)]
        self._client.log_dict(self.run_id, {"columns": list(table), "data": rows}, file)

    def send_artifact(self, name: str, path: Path, *, kind: str) -> None:
        send = self._client.log_artifacts if path.is_dir() else self._client.log_artifact
        send(self.run_id, str(path), artifact_path=_key(name))

    def flush(self) -> None:
        self._send_waiting()
        super().flush()

    def log_end(self, error: BaseException | None) -> None:
        self.flush()
        super().log_end(error)
        is_stopped = isinstance(error, KeyboardInterrupt | SystemExit)
        self._client.set_terminated(self.run_id, "FINISHED" if error is None else "KILLED" if is_stopped else "FAILED")

    def _send_waiting(self) -> None:
        for start in range(0, len(self._waiting), _NUM_METRICS):
            self._client.log_batch(self.run_id, metrics=self._waiting[start : start + _NUM_METRICS])
        self._waiting.clear()
        self._sent_at = time.monotonic()

    def _send_arrays(self, path: str, value: Histogram | PRCurve) -> None:
        self._client.log_dict(self.run_id, {name: array.tolist() for name, array in value._asdict().items()}, path)

    def _x(self, step: Step, scope: Scope) -> int:
        return step.batch if scope == "batch" or self.x_axis == "step" else step.epoch


def _key(name: str) -> str:
    """Replace the characters that MLflow does not allow in a name."""
    return re.sub(r"[^/\w.\- ]", "_", name)
