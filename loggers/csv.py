"""Logger that writes metrics to one CSV file per loader, tables to one per name, and hyperparameters to YAML."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from runnerkit.logger import Cell, Scope, Step
from runnerkit.loggers.files.log_folder import FolderLogger, claim_folder
from runnerkit.loggers.files.table import Table, drop_rows_after
from runnerkit.loggers.files.tables_file import PLACE, TablesFile, drop_tables_after
from runnerkit.storage.atomic_file import check_folder, remove_leftovers, write_text
from runnerkit.storage.links import refuse_links
from runnerkit.support.git_state import uncommitted_diff
from runnerkit.support.plain_values import plain

__all__ = ["CSVLogger"]


class CSVLogger(FolderLogger):
    """Logger that writes ``csv/<loader>.csv`` with the columns stage, epoch, step, and one for each metric.

    Metrics of training steps go to ``csv/<loader>.batch.csv``; ``runnerkit.read_metrics`` reads all of these files. The
    rows of ``runner.log_table`` go to ``tables/<tag>.csv``, after columns stage, loader, epoch and step.

    Args:
        logdir: created when the run starts.
        log_batch_metrics: log the metrics of training steps too.
        log_epoch_metrics: log the metrics of each pass over a loader.
        save_diff: write the uncommitted changes of the code to ``environment.json``.

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
        self,
        logdir: str | os.PathLike[str],
        *,
        log_batch_metrics: bool = False,
        log_epoch_metrics: bool = True,
        save_diff: bool = True,
    ) -> None:
        super().__init__(logdir, log_batch_metrics=log_batch_metrics, log_epoch_metrics=log_epoch_metrics)
        self._save_diff = save_diff
        self._folder = self.logdir / "csv"
        self._tables_folder = self.logdir / "tables"
        self._tables: dict[str, Table] = {}
        self._tables_files: dict[str, TablesFile] = {}

    def setup(self, *, resumed_at: Step | None = None) -> None:
        tables = list(self._tables_folder.rglob("*.csv"))
        traces = [*self._folder.rglob("*.csv"), *tables, *self.logdir.glob("hparams.yml")]
        claim_folder(self._folder, logdir=self.logdir, earlier_logs=traces, is_resumed=resumed_at is not None)
        if resumed_at is not None:
            for name in ("hparams.yml", "environment.json"):
                remove_leftovers(self.logdir / name)
            for folder in (self._folder, self._tables_folder):
                for leftover in folder.rglob(".*.csv.*.tmp"):  # also of files that were not written yet
                    leftover.unlink(missing_ok=True)
            for path in self._folder.rglob("*.csv"):
                drop_rows_after(path, resumed_at, name=path.relative_to(self._folder).as_posix())
            for path in tables:
                drop_tables_after(path, resumed_at, scope="batch" if path.name.endswith(".batch.csv") else "loader")

    def log_scalars(self, scalars: Mapping[str, float], *, step: Step, scope: Scope) -> None:
        if scope == "loader":  # not on every step: rows go to files that are already open
            check_folder(self._folder)
        name = f"{step.loader}.csv" if scope == "loader" else f"{step.loader}.batch.csv"
        if name not in self._tables:
            refuse_links(self._folder / name, below=self.logdir)
            self._tables[name] = Table(self._folder / name)
        self._tables[name].add(scalars, step=step)

    def log_table(self, tag: str, table: Mapping[str, Sequence[Cell]], *, step: Step, scope: Scope) -> None:
        """Append rows to ``tables/<tag>.csv``, or ``<tag>.batch.csv`` within a training loader.

        Raises:
            ValueError: the tag cannot name a file, or the columns differ from those of earlier tables.
        """
        name = f"{tag}.csv" if scope == "loader" else f"{tag}.batch.csv"
        is_hidden = any(part.startswith(".") or not part for part in tag.split("/"))
        if is_hidden or tag.endswith(".batch") or set(tag) & set('\\:*?"<>|\0\n'):
            raise ValueError(f"a table's tag names a file in {self._tables_folder}, which {tag!r} cannot")
        if reserved := set(table) & set(PLACE):
            raise ValueError(f"table {tag!r}: rename columns {sorted(reserved)}, which hold the rows' place in the run")
        check_folder(self._folder)
        if name not in self._tables_files:
            refuse_links(self._tables_folder / name, below=self.logdir)
            self._tables_files[name] = TablesFile(self._tables_folder / name)
        self._tables_files[name].add(table, step=step)

    def log_hparams(self, hparams: Mapping[str, Any], *, environment: Mapping[str, Any]) -> None:
        """Write ``hparams.yml`` and ``environment.json``; values that are not plain become strings.

        The environment has the uncommitted changes too, which services are not sent.
        """
        import yaml  # here, because it would add 20 ms to `import runnerkit`

        text = yaml.safe_dump(plain(hparams), sort_keys=False, allow_unicode=True)
        write_text(self.logdir / "hparams.yml", text)
        if self._save_diff and "git" in environment and (diff := uncommitted_diff()):
            environment = {**environment, "git": {**environment["git"], "diff": diff}}
        write_text(self.logdir / "environment.json", json.dumps(plain(environment), indent=2) + "\n")

    def close(self) -> None:
        for table in self._tables.values():
            table.close()
        self._tables.clear()
        self._tables_files.clear()
