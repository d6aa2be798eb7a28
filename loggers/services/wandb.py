"""Logger for Weights & Biases, online or offline."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from runnerkit.logger import Cell, Histogram, PRCurve, Scope, Step
from runnerkit.loggers.services.service import ServiceLogger
from runnerkit.support.plain_values import plain

__all__ = ["WandbLogger"]


class WandbLogger(ServiceLogger):
    """Logger that writes to a Weights & Biases run; a resumed training continues the same run.

    Each row holds ``epoch`` and ``step`` (training steps so far) beside its metrics. Charts of a loader's metrics use
    the epoch as x, charts of training steps the step; you can change this on the run's page. Hyperparameters become
    the run's config, together with the ``environment``.

    If a run is already active, for example in a sweep, the logger uses it and does not finish it.

    Args:
        logdir: stores the run's id and wandb's files, in ``wandb/``.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.
        log_checkpoint: send the best checkpoint of `logdir`, or the last if none is best, when the run ends.
        init: passed to ``wandb.init``: project, entity, name, ``mode="offline"``, ...

    >>> WandbLogger("logs", project="digits", mode="offline").init
    {'project': 'digits', 'mode': 'offline'}
    """

    service = "wandb"

    def __init__(
        self,
        logdir: str | os.PathLike[str],
        *,
        log_batch_metrics: bool = False,
        log_epoch_metrics: bool = True,
        log_checkpoint: bool = False,
        **init: Any,
    ) -> None:
        super().__init__(
            logdir,
            log_batch_metrics=log_batch_metrics,
            log_epoch_metrics=log_epoch_metrics,
            log_checkpoint=log_checkpoint,
        )
        own = sorted({"dir", "id", "resume"} & init.keys())
        if own:
            raise ValueError(
                f"WandbLogger sets {', '.join(own)} of wandb.init itself: pass logdir and train(resume=...) instead"
            )
        self.init = init
        self._run: Any = None
        self._is_ours = False
        self._known: set[str] = set()  # metrics whose x is defined
        self._has_failed = False

    def open_run(self, run_id: str | None) -> str:
        try:
            import wandb
        except ImportError as error:
            raise ImportError("WandbLogger needs wandb: pip install runnerkit[wandb]") from error
        self._is_ours, self._known, self._has_failed = wandb.run is None, set(), False
        if self._is_ours:
            run_id = run_id or secrets.token_hex(4)
            self._run = wandb.init(dir=self.logdir, id=run_id, resume="allow", **self.init)
        else:
            self._run = wandb.run
        self._run.define_metric("epoch", hidden=True)
        self._run.define_metric("step", hidden=True)
        return str(self._run.id)

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        config = {"environment": plain(environment), **plain(hparams)}
        self._run.config.update(config, allow_val_change=True)

    def send_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        self._log(dict(scalars), step=step, scope=scope)

    def send_text(self, name: str, text: str, *, step: Step, scope: Scope) -> None:
        import wandb

        self._log({name: wandb.Table(columns=["text"], data=[[text]])}, step=step, scope=scope)

    def send_image(self, name: str, image: np.ndarray, *, step: Step, scope: Scope) -> None:
        import wandb

        self._log({name: wandb.Image(image)}, step=step, scope=scope)

    def send_histogram(self, name: str, histogram: Histogram, *, step: Step, scope: Scope) -> None:
        import wandb

        counts_and_edges = histogram.counts.tolist(), histogram.edges.tolist()
        self._log({name: wandb.Histogram(np_histogram=counts_and_edges)}, step=step, scope=scope)

    def send_pr_curve(self, name: str, curve: PRCurve, *, step: Step, scope: Scope) -> None:
        import wandb

        rows = zip(curve.recall.tolist(), curve.precision.tolist(), curve.thresholds.tolist(), strict=True)
        table = wandb.Table(columns=["recall", "precision", "threshold"], data=[list(row) for row in rows])
        chart = wandb.plot.line(table, "recall", "precision", title=name)
        self._log({name: chart}, step=step, scope=scope)

    def send_table(self, name: str, table: Mapping[str, Sequence[Cell]], *, step: Step, scope: Scope) -> None:
        import wandb

        rows: list[Iterable[Cell]] = [list(row) for row in zip(*table.values(), strict=True)]
        self._log({name: wandb.Table(columns=list(table), data=rows)}, step=step, scope=scope)

    def send_artifact(self, name: str, path: Path, *, kind: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"{self.run_id}-{name.replace('/', '-')}", type=kind)
        add = artifact.add_dir if path.is_dir() else artifact.add_file
        add(str(path))
        self._run.log_artifact(artifact)

    def log_end(self, error: BaseException | None) -> None:
        super().log_end(error)
        self._has_failed = error is not None

    def close(self) -> None:
        super().close()
        run, self._run = self._run, None
        if run is not None and self._is_ours:
            run.finish(exit_code=int(self._has_failed))

    def _log(self, row: dict[str, Any], *, step: Step, scope: Scope) -> None:
        for name in row.keys() - self._known:
            self._run.define_metric(name, step_metric="step" if scope == "batch" else "epoch")
            self._known.add(name)
        # A resumed offline run would otherwise number its rows from 0 again.
        row_number = max(self._ledger.num_sent, self._run.step)
        self._run.log({**row, "epoch": step.epoch, "step": step.batch}, step=row_number, commit=True)
