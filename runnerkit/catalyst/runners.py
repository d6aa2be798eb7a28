"""Runners that write the files of Catalyst 21.12 beside their own, for programs that read these after the training."""

from __future__ import annotations

import csv
import io
import re
import shutil
from pathlib import Path
from typing import Self

from runnerkit import supervised, train
from runnerkit.loggers import CSVLogger
from runnerkit.storage.atomic_file import write_text
from runnerkit.storage.remote.urls import as_url

__all__ = ["Runner", "SelfSupervisedRunner", "SupervisedRunner"]


class Runner(train.Runner):
    """A :class:`.Runner` that ends with :func:`write_files`, on rank zero, for each local CSV logger.

    A `logdir` that is a URL keeps the files of runnerkit only.
    """

    def run(self) -> Self:
        super().run()
        if self.engine.rank == 0:
            for logger in self.get_loggers().values():
                if isinstance(logger, CSVLogger) and as_url(logger.logdir) is None:
                    write_files(logger.logdir)
        return self


class SupervisedRunner(Runner, supervised.SupervisedRunner):
    """A :class:`.SupervisedRunner` that writes Catalyst's files too."""


class SelfSupervisedRunner(Runner, supervised.SelfSupervisedRunner):
    """A :class:`.SelfSupervisedRunner` that writes Catalyst's files too."""


def write_files(logdir: Path) -> None:
    """Write ``logs/<loader>.csv`` and ``tb_profile/trace.pt.trace.json`` from ``csv/<loader>.csv`` and ``trace.json``.

    The tables have the columns step, which is the epoch of the stage, and metrics, sorted, with top-1 accuracy as
    "accuracy01".

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "csv").mkdir()
    >>> _ = (folder / "csv" / "valid.csv").write_text("stage,epoch,step,loss,accuracy\\ntrain,1,100,0.5,0.75\\n")
    >>> write_files(folder)
    >>> print((folder / "logs" / "valid.csv").read_text())
    step,accuracy01,loss
    1,0.75,0.5
    <BLANKLINE>
    """
    for path in (logdir / "csv").rglob("*.csv"):
        if not path.name.endswith(".batch.csv"):
            target = logdir / "logs" / path.relative_to(logdir / "csv")
            target.parent.mkdir(parents=True, exist_ok=True)
            write_text(target, _table(path))
    if (logdir / "trace.json").exists():
        (logdir / "tb_profile").mkdir(exist_ok=True)
        shutil.copyfile(logdir / "trace.json", logdir / "tb_profile" / "trace.pt.trace.json")


def _table(path: Path) -> str:
    with path.open(newline="", encoding="utf-8") as file:
        (_, _, _, *names), *rows = csv.reader(file)  # stage, epoch, step
    columns = sorted((re.sub(r"\baccuracy$", "accuracy01", name), place) for place, name in enumerate(names, start=3))
    table = io.StringIO(newline="")
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["step", *(name for name, _ in columns)])
    writer.writerows([row[1], *(row[place] for _, place in columns)] for row in rows)
    return table.getvalue()
