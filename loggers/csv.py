"""Logger that writes metrics to one CSV file per loader, and hyperparameters to YAML."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from runnerkit.logger import Scope, Step
from runnerkit.loggers.files.log_folder import FolderLogger, claim_folder
from runnerkit.loggers.files.table import Table, drop_rows_after
from runnerkit.storage.atomic_file import check_folder, remove_leftovers, write_text
from runnerkit.storage.links import refuse_links
from runnerkit.support.plain_values import plain

__all__ = ["CSVLogger"]


class CSVLogger(FolderLogger):
    """Logger that writes ``csv/<loader>.csv`` with the columns stage, epoch, step, and one for each metric.

    Metrics of training steps go to ``csv/<loader>.batch.csv``. Read all files with ``runnerkit.read_metrics``.

    Args:
        logdir: created when the run starts.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.

    >>> import tempfile
    >>> logger = CSVLogger(tempfile.mkdtemp())
    >>> logger.setup()
    >>> logger.log_scalars({"loss": 0.5}, step=Step("train", "valid", epoch=1, batch=100), scope="loader")
    >>> print((logger.logdir / "csv" / "valid.csv").read_text())
    stage,epoch,step,loss
    train,1,100,0.5
    <BLANKLINE>
    >>> logger.close()
    """

    is_essential = True

    def __init__(
        self, logdir: str | os.PathLike[str], *, log_batch_metrics: bool = False, log_epoch_metrics: bool = True
    ) -> None:
        super().__init__(logdir, log_batch_metrics=log_batch_metrics, log_epoch_metrics=log_epoch_metrics)
        self._folder = self.logdir / "csv"
        self._tables: dict[str, Table] = {}

    def setup(self, *, resumed_at: Step | None = None) -> None:
        traces = [*self._folder.rglob("*.csv"), *self.logdir.glob("hparams.yml")]
        claim_folder(self._folder, logdir=self.logdir, earlier_logs=traces, is_resumed=resumed_at is not None)
        if resumed_at is not None:
            for name in ("hparams.yml", "environment.json"):
                remove_leftovers(self.logdir / name)
            for leftover in self._folder.rglob(".*.csv.*.tmp"):  # also of files that were not written yet
                leftover.unlink(missing_ok=True)
            for path in self._folder.rglob("*.csv"):
                drop_rows_after(path, resumed_at, name=path.relative_to(self._folder).as_posix())

    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        if scope == "loader":  # not on every step: rows go to files that are already open
            check_folder(self._folder)
        name = f"{step.loader}.csv" if scope == "loader" else f"{step.loader}.batch.csv"
        if name not in self._tables:
            refuse_links(self._folder / name, below=self.logdir)
            self._tables[name] = Table(self._folder / name)
        self._tables[name].add(scalars, step=step)

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        """Write ``hparams.yml`` and ``environment.json``; values that are not plain become strings."""
        import yaml  # here, because it would add 20 ms to `import runnerkit`

        text = yaml.safe_dump(plain(hparams), sort_keys=False, allow_unicode=True)
        write_text(self.logdir / "hparams.yml", text)
        write_text(self.logdir / "environment.json", json.dumps(plain(environment), indent=2) + "\n")

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        self._tables.clear()
